"""Runs a script as `python SCRIPT ARGUMENTS` does, on the fake NPU."""

import runpy
import sys

from llama_adapter.runtime.devices import open_backend
from tests.npu.inside.host_ops import HostOps

if __name__ == "__main__":
    del sys.argv[0]
    open_backend("npu:0")
    with HostOps():
        runpy.run_path(sys.argv[0], run_name="__main__")
