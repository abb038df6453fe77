"""The fake InferSession: the checks of the real one, then arrays become pointers, and calls are passed on."""

import logging
import os
import re
import stat
import sys
from collections.abc import Sequence
from typing import Any

import aclruntime
import numpy as np

# The real modules also do this at import, to the root logger of the importing program.
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="[%(levelname)s] %(message)s")


def check_model_path(path: str) -> None:
    """The rules since 2024; the reasons are only logged."""
    if not path:
        raise RuntimeError("empty model path!")
    absolute = os.path.abspath(path)
    if re.search(r"[^_A-Za-z0-9/.-]", absolute) or len(absolute) > 4096:
        raise ValueError("The path string is illegal. Please check.")
    if not os.path.isfile(absolute):
        raise ValueError(f"The path:{path} is not a file.")
    status = os.stat(absolute)
    is_own = status.st_uid == os.geteuid() or status.st_gid in os.getgroups()
    if os.path.islink(absolute) or not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        logging.error("path: %s is a soft link, or not yours, or writable by others", absolute)
        raise ValueError(f"The path:{path} is illegal. Please check the error log for more detail.")
    if not os.access(absolute, os.R_OK) or not status.st_mode & stat.S_IRUSR:
        logging.error("path: %s has no right to be read", absolute)
        raise ValueError(f"The path:{path} is illegal. Please check the error log for more detail.")
    if os.path.splitext(absolute)[1] != ".om":
        raise ValueError(f"The suffix of path:{path} not in ['om']. Please check.")


class InferSession:
    def __init__(
        self, device_id: int, model_path: str, acl_json_path: str | None = None, debug: bool = False, loop: int = 1
    ) -> None:
        self._is_new = int(os.environ.get("FAKE_AIS_BENCH", "2024")) >= 2024
        if self._is_new:
            check_model_path(model_path)
            if not isinstance(device_id, int):
                raise TypeError(f"device:{device_id} is not a integer!")
            if not 0 <= device_id <= 255:
                raise ValueError(f"device:{device_id} is illegal. legal value range is [0, 255]")
        self.session = aclruntime.InferenceSession(model_path, device_id)

    def get_inputs(self) -> list[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return self.session.get_outputs()

    def infer(self, feeds: list[np.ndarray], mode: str = "static") -> list[np.ndarray]:
        if self._is_new and not isinstance(feeds, list):
            raise ValueError("the list be checked is not a list!")
        if self._is_new and not feeds:
            raise ValueError("the list is empty")
        for feed in feeds:
            if not isinstance(feed, np.ndarray):
                raise RuntimeError(f"type:{type(feed)} invalid")
        self._prepare(mode, [feed.shape for feed in feeds])
        arrays = [np.ascontiguousarray(feed) for feed in feeds]
        tensors = [aclruntime.BaseTensor(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
        outputs = self.session.run([], tensors)
        for output in outputs:
            output.to_host()
        return [np.array(output) for output in outputs]

    def _prepare(self, mode: str, shapes: Sequence[tuple[int, ...]]) -> None:
        wanted = self.get_inputs()
        if mode == "static":
            self.session.set_staticbatch()
            return
        if mode not in ("dymbatch", "dymdims"):
            raise ValueError("infer mode is illegal, Please check.")
        if len(shapes) != len(wanted):
            raise RuntimeError("input datas and intensors nums not matched!")
        if mode == "dymdims":
            named = zip(wanted, shapes, strict=True)
            self.session.set_dynamic_dims(";".join(f"{port.name}:{','.join(map(str, shape))}" for port, shape in named))
            return
        for port, shape in zip(wanted, shapes, strict=True):
            for want, size in zip(port.shape, shape, strict=True):
                if want < 0:
                    self.session.set_dynamic_batchsize(size)
                    return
                if want != size:
                    raise RuntimeError("input datas and intensors dim not matched!")
        raise RuntimeError("not a dymbatch model!")

    def summary(self) -> Any:
        return self.session.sumary()

    def reset_summaryinfo(self) -> None:
        self.session.reset_sumaryinfo()

    def free_resource(self) -> None:
        self.session.free_resource()

    @staticmethod
    def finalize() -> None:
        aclruntime.InferenceSession.finalize()
