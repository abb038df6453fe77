"""An OM with several inputs and gears over several dimensions, run by ais_bench in a separate thread.

Tested with a stand-in for ais_bench only.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.dims_sidecar import read_dims_sidecar
from llama_adapter.runtime.graphs.gears import Gear, num_bytes, shape_in
from llama_adapter.runtime.graphs.om_file import OmModel
from llama_adapter.runtime.graphs.om_session import OmThread
from llama_adapter.runtime.graphs.session import as_inputs
from llama_adapter.runtime.graphs.sidecar import check_om_file

_HINT = "the OM and its side-car do not belong together: make both again"


class OmDimsSession:
    """One OM that was made with --dynamic_dims. All gears share one copy of the weights on the device.

    In each call, ais_bench copies every input to the device and every output back. For threads, see `OmSession`.
    """

    def __init__(self, path: str | os.PathLike[str], *, device_id: int = 0) -> None:
        """Raises GraphError for files, side-cars, installations and devices that cannot be used."""
        self.file, self.name = os.path.abspath(path), f"ais_bench (device {device_id})"
        check_om_file(self.file)
        sidecar = read_dims_sidecar(self.file)
        self.inputs, self.outputs, self.gears = sidecar.inputs, sidecar.outputs, sidecar.gears
        self.sources = sidecar.sources  # names of the files that it was compiled from -> `file_mark`
        self._thread = OmThread(file=self.file, name=self.name)
        try:
            self._model = self._thread.open(lambda: OmModel(self.file, device_id=device_id, soc=sidecar.soc_version))
            self._check_ports()
        except BaseException:
            self.close()
            raise

    @property
    def device_ms(self) -> float | None:
        """Milliseconds that the last `run` took on the device; None if they are not measured."""
        return self._model.device_ms

    def pick(self, needed: Mapping[str, int]) -> Gear:
        """The gear with at least the needed sizes that copies the fewest bytes. Raises GraphError if there is none."""
        ports = (*self.inputs, *(port for port in self.outputs if all(port.symbols)))
        fitting = (gear for gear in self.gears if all(gear[name] >= size for name, size in needed.items()))
        gear = min(fitting, key=lambda gear: num_bytes(ports, gear), default=None)
        if gear is None:
            raise GraphError(
                f"No gear of `{self.file}` has {_told(needed)}; its gears: {'; '.join(map(_told, self.gears))}",
                hint="use a shorter prompt or fewer rows, or compile the OM with a larger gear",
            )
        return gear

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One array per input, in the shapes of a gear, cast to the graph's types -> one array per output.

        Raises GraphError for other shapes, and if ais_bench fails.
        """
        gear = self._gear_of(inputs)
        arrays = as_inputs(inputs, self.inputs)
        wanted = f"the gear {_told(gear)}"
        outputs = self._thread.call(lambda: self._model.infer(arrays, mode="dymdims", wanted=wanted))
        for output, port in zip(outputs, self.outputs, strict=True):
            promised = Port(name=port.name, dtype=port.dtype, shape=shape_in(port, gear))
            if not promised.fits(Port.of(output)):
                raise GraphError(
                    f"`{self.file}` promises {promised} as `{port.name}` in the gear {_told(gear)}, and gave "
                    f"{Port.of(output)}",
                    hint=_HINT,
                )
        return outputs

    def close(self) -> None:
        """Unload the file and end the thread. May be repeated."""
        self._thread.close()

    def _gear_of(self, inputs: Sequence[np.ndarray]) -> Gear:
        """The gear with these shapes. This check is needed because ais_bench compares only numbers of bytes."""
        given = [array.shape for array in inputs]
        for gear in self.gears:
            if [shape_in(port, gear) for port in self.inputs] == given:
                return gear
        named = ", ".join(f"{port.name} {shape}" for port, shape in zip(self.inputs, given, strict=False))
        raise GraphError(
            f"`{self.file}` has {len(self.inputs)} inputs and was given {len(given)} ({named}), in the shapes of no "
            f"gear; its gears: {'; '.join(map(_told, self.gears))}",
            hint="pad the arrays to the sizes that `pick` gives",
        )

    def _check_ports(self) -> None:
        """Raise GraphError if inputs or outputs of the OM differ from its side-car.

        ATC may rename outputs, and ACL describes them in the sizes of the largest gear.
        """
        for verb, found, stored, is_same in (
            ("takes", self._model.inputs, self.inputs, Port.__eq__),
            ("gives", self._model.outputs, self.outputs, Port.fits),
        ):
            if len(found) != len(stored) or not all(map(is_same, stored, found)):
                raise GraphError(
                    f"`{self.file}` {verb} {_ports(found)}, and its side-car says {_ports(stored)}", hint=_HINT
                )


def _told(gear: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in gear.items())


def _ports(ports: Sequence[Port]) -> str:
    return ", ".join(f"{port.name} {port}".strip() for port in ports)
