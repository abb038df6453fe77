"""Puts compiled kernels into a wheel. hatchling runs this for `python -m scripts.build_wheel`, and else does not."""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG, FOLDER = "LLAMA_ADAPTER_WHEEL_TAG", "LLAMA_ADAPTER_WHEEL_KERNELS"  # environment variables
ENABLED = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
PLACE = "llama_adapter/runtime/kernels/prebuilt"  # in the wheel


class KernelsHook(BuildHookInterface[Any]):
    """Gives the wheel a tag for one machine, and a folder of libraries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["pure_python"] = False
        build_data["tag"] = os.environ[TAG]
        build_data["force_include"][os.environ[FOLDER]] = PLACE
