"""Names of files with weights. This module imports no torch, because help and exported models do without it."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

# The weights of a folder in Hugging Face's format; of shards, NAME.index.json is the list.
WEIGHT_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Whether the name is that of a GGUF file. Ollama's files have no suffix, so their content tells."""
    if not path.suffix and path.is_file():
        with suppress(OSError), path.open("rb") as file:
            return file.read(4) == b"GGUF"
    return path.suffix == ".gguf"


def gguf_parts(path: Path) -> list[Path]:
    """The names of all files of a split model, NAME-00001-of-00003.gguf and so on; `path` alone if it is not split."""
    match = _PART.fullmatch(path.name)
    if match is None or not int(match[3]):
        return [path]
    return [path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
