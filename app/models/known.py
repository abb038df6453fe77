"""What is known of a model that was loaded before, in the user's cache, so that jobs plan their work before any model.

`known/KEY.json` has the resolved spec and the `ModelInfo` of a model that one process computes on the CPU. KEY stands
for the spec, this program and the processor. Sizes and times of all files beside the model's must be as they were. The
folder may be deleted.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import llama_adapter
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.spec import AUTO, CaptionerSpec, ModelInfo
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.device_names import may_have_accelerator
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.kernels.instruction_sets import CHOICE, processor_flags
from llama_adapter.runtime.user_cache import cache_folder
from llama_adapter.vision.pixels import PixelRule

_FOLDER: Final = "known"
_MOST_FILES: Final = 64  # the oldest ones are removed
# Fields of a spec that pass through a load unchanged, so the present ones are used.
_PASSING: Final = ("batch_size", "exif", "transparency", "damaged", "reading", "strict", "parallel_timeout")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model as it was loaded: the spec, in which no value is "auto", its description, and its rule for pixels."""

    spec: CaptionerSpec
    info: ModelInfo
    pixels: PixelRule

    @classmethod
    def recall(cls, spec: CaptionerSpec) -> Self | None:
        """What is known of the model of a spec; None if it was not loaded before, or something has changed since."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(_place(spec).read_bytes())
            if content["files"] != _files_of(spec) or 2 * _num_bytes(content["files"]) > (free_host_bytes() or 0):
                return None
            passing = {name: getattr(spec, name) for name in _PASSING}
            info = ModelInfo(**{**content["info"], "notes": tuple(content["info"]["notes"])})
            lists = {name: tuple(content["pixels"][name]) for name in ("mean", "std")}
            pixels = PixelRule(**content["pixels"] | lists)
            return cls(spec=CaptionerSpec(**content["spec"] | passing), info=info, pixels=pixels)
        return None

    def remember(self, spec: CaptionerSpec) -> None:
        """Keep this for `spec`, which was loaded. If that fails, the model is loaded first next time too."""
        with suppress(OSError, ValueError):
            place = _place(spec)
            content = {**dataclasses.asdict(self), "files": _files_of(spec)}
            with atomic_write(place) as file:
                file.write(json.dumps(content).encode())
            known = sorted(place.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
            for old in known[:-_MOST_FILES]:
                old.unlink(missing_ok=True)


def _place(spec: CaptionerSpec) -> Path:
    """The file for a spec. Raises ValueError for a model that may be on another device, or in other processes."""
    is_here = spec.device == "cpu" or (spec.device == AUTO and not may_have_accelerator())
    if not is_here or spec.decoder is not None or spec.encoder is not None or spec.tensor_parallel > 1:
        raise ValueError("it is computed elsewhere")
    if spec.batch_size == AUTO:
        raise ValueError("its batch size depends on the free memory")
    given = {name: value for name, value in dataclasses.asdict(spec).items() if name not in _PASSING}
    parts = [given, os.getcwd(), _program(), sorted(processor_flags()), os.environ.get(CHOICE)]
    return cache_folder() / _FOLDER / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"


@functools.cache
def _program() -> list[Any]:
    """This program: its version, and the last change of its files, for checkouts."""
    root = Path(llama_adapter.__file__).parent
    files = (file for part in ("app", "llm", "runtime", "vision") for file in (root / part).resolve().rglob("*.[pch]*"))
    return [llama_adapter.__version__, max(file.stat().st_mtime_ns for file in files)]


def _files_of(spec: CaptionerSpec) -> dict[str, list[int]]:
    """Sizes, times and rights of the files of a spec and of those beside them, by path."""
    if spec.llama_dir is None:
        places = [bundle_folder(spec.model)]
    else:
        llama = Path(spec.llama_dir)
        places = [llama, llama.absolute().parent, llama / (spec.llama_type or "")]  # a tokenizer may be above
    places += [Path(name) for name in (spec.adapter, spec.clip, spec.past_key_values) if name is not None]
    places += [Path(part) for text in spec.lora for part in (text, text.rpartition("=")[0]) if part]
    folders = {place if place.is_dir() else place.parent for place in places}
    return {entry.path: _marks(entry.stat()) for folder in folders for entry in os.scandir(folder) if entry.is_file()}


def _marks(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid, status.st_gid]


def _num_bytes(files: Mapping[str, list[int]]) -> int:
    return sum(marks[0] for marks in files.values())
