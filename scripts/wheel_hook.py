"""A hatchling build hook that puts compiled kernels into a wheel. Only `python -m scripts.build_wheel` enables it."""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG, FOLDER = "LLAMA_ADAPTER_WHEEL_TAG", "LLAMA_ADAPTER_WHEEL_KERNELS"  # environment variables
ENABLED = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
PLACE = "llama_adapter/runtime/kernels/prebuilt"  # path in the wheel


class KernelsHook(BuildHookInterface[Any]):
    """Gives the wheel a tag for one machine, and adds a folder of libraries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["tag"] = os.environ[TAG]
        build_data["force_include"][os.environ[FOLDER]] = PLACE
