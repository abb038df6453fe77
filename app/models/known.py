"""What is known of a model that was loaded before, in the user's cache, so that jobs plan their work before any model.

`known/KEY.json` has the resolved spec and the `ModelInfo` of a model that one process computes on the CPU. KEY stands
for the spec, this program and the processor. The model's files, and all beside them, must be as before they were read.
The folder may be deleted.
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
from llama_adapter.runtime.atomic_write import write_text
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.kernels.instruction_sets import CHOICE, processor_flags
from llama_adapter.runtime.user_cache import cache_folder
from llama_adapter.vision.pixels import PixelRule

_FOLDER: Final = "known"
_MOST_MODELS: Final = 16  # the oldest ones are removed
FileMarks = Mapping[str, list[int]]  # size, times and number of each file, by path
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
            files, info, pixels = (content[name] for name in ("files", "info", "pixels"))
            num_bytes = sum(marks[0] for marks in files.values())
            if files != marks_of(spec) or 2 * num_bytes > (free_host_bytes() or 0):
                return None
            lists = {name: tuple(pixels[name]) for name in ("mean", "std")}
            return cls(
                spec=CaptionerSpec(**content["spec"] | {name: getattr(spec, name) for name in _PASSING}),
                info=ModelInfo(**info | {"notes": tuple(info["notes"])}),
                pixels=PixelRule(**pixels | lists),
            )
        return None

    def remember(self, spec: CaptionerSpec, *, files: FileMarks | None) -> None:
        """Keep this for `spec`, unless it sees pictures as tokens. If keeping fails, it is loaded first next time too.

        `files` is the result of `marks_of` before the model was loaded, so that files that change meanwhile are
        noticed.
        """
        if files is None or self.info.picture_format is not None:
            return
        with suppress(OSError, ValueError):
            place = _place(spec)
            write_text(place, json.dumps(dataclasses.asdict(self) | {"files": files}))
            others = sorted(place.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
            for old in others[:-_MOST_MODELS]:
                old.unlink(missing_ok=True)


def marks_of(spec: CaptionerSpec) -> FileMarks | None:
    """The marks of the files of a spec and of those beside them, as they are.

    None if they cannot be listed, and for a model that may be on another device or in other processes, or whose batch
    size depends on the free memory.
    """
    is_alone = spec.decoder is None and spec.encoder is None and spec.tensor_parallel == 1
    if not (spec.is_on_cpu and is_alone) or spec.batch_size == AUTO:
        return None
    marks = {}
    with suppress(OSError, UsageError):
        if spec.llama_dir is None:
            places = [bundle_folder(spec.model)]
        else:
            llama = Path(spec.llama_dir)
            places = [llama, llama.absolute().parent, llama / (spec.llama_type or "")]  # a tokenizer may be above
        places += [Path(name) for name in (spec.adapter, spec.clip, spec.past_key_values) if name is not None]
        places += [Path(part) for text in spec.lora for part in (text, text.rpartition("=")[0]) if part]
        for folder in {place if place.is_dir() else place.parent for place in places}:
            for entry in filter(os.DirEntry.is_file, os.scandir(folder)):
                status = entry.stat()
                # A file's number tells two files of one size and time apart. Its own time changes with its rights too.
                marks[entry.path] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        return marks
    return None


def _place(spec: CaptionerSpec) -> Path:
    """The file for a spec. In another folder, a spec with relative paths has another one."""
    given = {name: value for name, value in dataclasses.asdict(spec).items() if name not in _PASSING}
    paths = (spec.model, spec.llama_dir, spec.adapter, spec.clip, spec.past_key_values, *spec.lora)
    places = [os.path.abspath(path) for path in paths if path is not None]
    parts = [given, places, _program(), sorted(processor_flags()), os.environ.get(CHOICE)]
    return cache_folder() / _FOLDER / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"


@functools.cache
def _program() -> list[Any]:
    """This program: its version, and the last change of its files, for checkouts."""
    root = Path(llama_adapter.__file__).parent
    newest = 0
    for part in ("app", "llm", "runtime", "vision"):
        for folder, _, files in os.walk((root / part).resolve()):
            sources = (os.path.join(folder, file) for file in files if file.endswith((".py", ".c", ".h")))
            newest = max(newest, *(os.stat(source).st_mtime_ns for source in sources), 0)
    return [llama_adapter.__version__, newest]
