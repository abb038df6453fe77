"""Small GGUF files for tests, written by the package `gguf`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter


def write_gguf(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]],
) -> Path:
    """Write keys and tensors; a tensor of blocks is a pair of its bytes (rows, bytes of a row) and their type."""
    writer = GGUFWriter(path, str(keys.get("general.architecture", "llama")))
    for key, value in keys.items():
        if key != "general.architecture":
            writer.add_key_value(key, value.tolist() if isinstance(value, np.ndarray) else value, *_types(value))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(value: Any) -> tuple[GGUFValueType, ...]:
    if isinstance(value, list | np.ndarray):
        return GGUFValueType.ARRAY, _types(value[0].item() if isinstance(value, np.ndarray) else value[0])[0]
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return (GGUFValueType[kinds[type(value)]],)
