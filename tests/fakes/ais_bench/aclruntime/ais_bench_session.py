"""What the fake InferSessions of both generations share: feeds to pointers, modes, and calls that are passed on."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import aclruntime
import numpy as np

# The real modules do this when imported, to the root logger of whoever imports them.
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="[%(levelname)s] %(message)s")

_DTYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Long", "Bool", "Int")
MODES = ("static", "dymbatch", "dymhw", "dymdims", "dymshape")


class Session:
    """`InferSession` without the checks that came in 2024."""

    def __init__(
        self, device_id: int, model_path: str, acl_json_path: str | None = None, debug: bool = False, loop: int = 1
    ) -> None:
        self.session = aclruntime.InferenceSession(model_path, device_id, aclruntime.session_options())
        self.outputs_names = [description.name for description in self.session.get_outputs()]

    def get_inputs(self) -> list[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return self.session.get_outputs()

    def get_max_dym_batchsize(self) -> int:
        return self.session.get_max_dym_batchsize()

    def infer(self, feeds: Any, mode: str = "static", custom_sizes: Any = 100000, out_array: bool = True) -> Any:
        arrays = [_array(feed) for feed in feeds]
        prepare: dict[str, Callable[[list[np.ndarray]], None]] = {
            "static": lambda arrays: self.session.set_staticbatch(),
            "dymbatch": self._choose_gear,
        }
        if mode not in prepare:
            raise RuntimeError(f"wrong infer_mode:{mode}, only support {MODES}")
        prepare[mode](arrays)
        tensors = [aclruntime.BaseTensor(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
        outputs = self.session.run(self.outputs_names, tensors)
        if not out_array:
            return outputs
        for output in outputs:
            output.to_host()
        return [np.array(output) for output in outputs]

    def _choose_gear(self, arrays: list[np.ndarray]) -> None:
        descriptions = self.get_inputs()
        if len(arrays) != len(descriptions):
            raise RuntimeError("input datas and intensors nums not matched!")
        for array, description in zip(arrays, descriptions, strict=True):
            for have, want in zip(array.shape, description.shape, strict=False):
                if want < 0:
                    self.session.set_dynamic_batchsize(have)
                    return
                if have != want:
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


def _array(feed: Any) -> np.ndarray:
    if type(feed) is np.ndarray or isinstance(feed, np.generic):
        return np.ascontiguousarray(feed)
    if hasattr(feed, "type") and feed.type() in [f"torch.{name}Tensor" for name in _DTYPES]:
        return np.ascontiguousarray(feed.numpy())
    raise RuntimeError(f"type:{type(feed)} invalid")
