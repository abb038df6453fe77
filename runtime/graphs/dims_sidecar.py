"""The side-car of an OM with gears over several dimensions: its inputs, outputs, gears and weight files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.gears import Gear, check_gears
from llama_adapter.runtime.graphs.sidecar import check_digest, read_text, sidecar_path
from llama_adapter.runtime.json_object import check_fields, check_mapping, read_object, take_version

FORMAT_VERSION: Final = 3  # the side-cars of OMs with one input have version 2
WEIGHTS_FOLDER: Final = "weight"  # the folder next to the OM where ACL looks for external weights
_FIELDS: Final = {
    "inputs": list,
    "outputs": list,
    "gears": list,
    "weights": dict,
    "sources": dict,
    "soc_version": str,
    "precision_mode": str,
    "sha256": str,
    "onnx_sha256": str,
}
_AGAIN: Final = "make the OM again"


@dataclass(frozen=True, kw_only=True, slots=True)
class DimsSidecar:
    """The facts that cannot be read from the OM itself.

    Raises ValueError for gears that ATC, ACL or ais_bench refuse.
    """

    inputs: tuple[Port, ...]  # with names of their dynamic sizes
    outputs: tuple[Port, ...]
    gears: tuple[Gear, ...]
    weights: Mapping[str, int]  # files in WEIGHTS_FOLDER and their bytes; none if the OM contains them
    soc_version: str
    precision_mode: str
    sources: Mapping[str, str]  # names of the .onnx and of its external weights -> `file_mark`
    sha256: str  # of the .om
    onnx_sha256: str  # of the .onnx followed by its external weights

    def __post_init__(self) -> None:
        check_gears(self.inputs, self.gears)

    def to_json(self) -> str:
        """The text that is stored next to the OM."""
        values = {
            "version": FORMAT_VERSION,
            "inputs": [_port_to_json(port) for port in self.inputs],
            "outputs": [_port_to_json(port) for port in self.outputs],
            "gears": [dict(gear) for gear in self.gears],
            "weights": dict(self.weights),
            "sources": dict(self.sources),
            **{name: getattr(self, name) for name in ("soc_version", "precision_mode", "sha256", "onnx_sha256")},
        }
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, file: str) -> "DimsSidecar":
        """Inverse of `to_json`. Raises GraphError, which names `file`, for damage and for other versions."""
        try:
            values = read_object(text)
            take_version(values, FORMAT_VERSION)
            check_fields(values, _FIELDS, what="the side-car")
            for gear in values["gears"]:
                check_mapping(gear, int, what="a gear")
            check_mapping(values["weights"], int, what="weights")
            check_mapping(values["sources"], str, what="sources")
            ports = {name: tuple(map(_port_from_json, values.pop(name))) for name in ("inputs", "outputs")}
            return cls(inputs=ports["inputs"], outputs=ports["outputs"], gears=tuple(values.pop("gears")), **values)
        except (TypeError, ValueError) as error:
            raise GraphError(f"The side-car `{file}` cannot be read: {error}", hint=_AGAIN) from None


def read_dims_sidecar(om_path: str) -> DimsSidecar:
    """The side-car of an OM with gears, which every such OM needs. Reads the whole OM.

    Raises GraphError if the side-car is missing, damaged or belongs to another file, or if a weight file is missing.
    """
    path = sidecar_path(om_path)
    if (text := read_text(path)) is None:
        raise GraphError(
            f"`{om_path}` needs its side-car `{path.name}`, which lists its gears, but the side-car is missing",
            hint=f"copy it too, it is written with the OM; or {_AGAIN}",
        )
    sidecar = DimsSidecar.from_json(text, file=str(path))
    check_digest(om_path, sidecar.sha256, again=_AGAIN)
    for name, size in sidecar.weights.items():
        file = Path(om_path).parent / WEIGHTS_FOLDER / name
        if not file.is_file() or file.stat().st_size != size:
            raise GraphError(
                f"`{om_path}` has weights in `{file}`, but this file is missing or has another size",
                hint=f"copy the folder `{WEIGHTS_FOLDER}` with the OM; or {_AGAIN}",
            )
    return sidecar


def _port_to_json(port: Port) -> dict[str, Any]:
    """A dynamic size is written as its name, or as null if it has no name."""
    names = iter(port.symbols)
    shape = [(next(names, "") or None) if size < 0 else size for size in port.shape]
    return {"name": port.name, "dtype": port.dtype, "shape": shape}


def _port_from_json(values: Any) -> Port:
    check_fields(values, {"name": str, "dtype": str, "shape": list}, what="an input or output")
    shape = values["shape"]
    if any(type(size) not in (int, str, type(None)) for size in shape):
        raise ValueError(f"shape must be whole numbers and names, and is {shape!a}")
    return Port(
        name=values["name"],
        dtype=values["dtype"],
        shape=tuple(size if isinstance(size, int) else -1 for size in shape),
        symbols=tuple(size or "" for size in shape if not isinstance(size, int)),
    )
