"""The fake InferSession: arrays become pointers, and calls are passed on."""

import logging
import sys
from typing import Any

import aclruntime
import numpy as np

# The real modules also do this at import, to the root logger of the importing program.
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="[%(levelname)s] %(message)s")


class InferSession:
    def __init__(self, device_id: int, model_path: str) -> None:
        self.session = aclruntime.InferenceSession(model_path, device_id)

    def get_inputs(self) -> list[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return self.session.get_outputs()

    def infer(self, feeds: list[np.ndarray], mode: str = "static") -> list[np.ndarray]:
        if mode == "dymbatch":
            self.session.set_dynamic_batchsize(len(feeds[0]))
        elif mode == "dymdims":
            wanted = self.get_inputs()
            if len(feeds) != len(wanted):
                raise RuntimeError("input datas and intensors nums not matched!")
            named = zip(wanted, feeds, strict=True)
            self.session.set_dynamic_dims(";".join(f"{port.name}:{','.join(map(str, a.shape))}" for port, a in named))
        else:
            self.session.set_staticbatch()
        arrays = [np.ascontiguousarray(feed) for feed in feeds]
        tensors = [aclruntime.BaseTensor(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
        outputs = self.session.run([], tensors)
        for output in outputs:
            output.to_host()
        return [np.array(output) for output in outputs]

    def summary(self) -> Any:
        return self.session.sumary()

    def reset_summaryinfo(self) -> None:
        self.session.reset_sumaryinfo()

    def free_resource(self) -> None:
        self.session.free_resource()

    @staticmethod
    def finalize() -> None:
        aclruntime.InferenceSession.finalize()
