"""Prefix files: pictures encoded on one machine, for a decoder on another. Names are here, the format in `file.py`."""

import os
import re
from typing import Final

PREFIX_FILE: Final = re.compile(r"prefixes-(\d{5,})\.safetensors")
FIRST_FILE: Final = "prefixes-00000.safetensors"


def is_prefixes(name: str) -> bool:
    """Whether a name is that of a prefix file or of a folder of prefix files."""
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, FIRST_FILE))
    return name.endswith(".safetensors") and os.path.isfile(name)
