"""The format of the tests' OM files: a line of JSON, then the ONNX graph that the fake runtime computes with."""

import json
from pathlib import Path
from typing import Any


def write_fake_om(path: Path, *, header: dict[str, Any], onnx: bytes) -> None:
    """Write a file; `header` holds batch_sizes, has_gears, soc_version, and the ONNX graph's input and output.

    These are "input" and "output", each {"name", "dtype", "shape"}; -1 in a shape is the batch in gears. An OM with
    gears over several dimensions has "inputs" and "outputs" with names of open sizes in their shapes, and "gears"
    {name: size} in place of batch_sizes and has_gears. With "weight", `onnx` is empty, and the graph is in the file
    with this name in the folder `weight` next to the OM.
    """
    path.write_bytes(json.dumps({"fake_om": 1, **header}).encode() + b"\n" + onnx)


def read_fake_om(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and ONNX bytes. Raises ValueError for other files."""
    line, separator, onnx = path.read_bytes().partition(b"\n")
    header: dict[str, Any] = json.loads(line) if separator else {}
    if header.get("fake_om") != 1:
        raise ValueError(f"{path} is no fake OM")
    if "weight" in header:
        file = path.parent / "weight" / header["weight"]
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        onnx = file.read_bytes()
    return header, onnx
