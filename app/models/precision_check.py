"""Refuses number formats of weights that a device has no operators for, and ways to compute that they do not have."""

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision


def check_asked_precision(spec: CaptionerSpec, *, backend: Backend) -> None:
    """Raise DeviceError if `spec` asks for a precision that the device cannot compute with.

    A stored precision that nobody asked for is no error: such weights are widened, and a note says so.
    """
    if spec.precision is None or not (why := backend.refusal(spec.precision, wanted=spec.operators)):
        return
    others = [name for name in QUANTISED if name != spec.precision and not backend.refusal(name)]
    ways = [f"`--precision {name}`" for name in (*others, FLOAT)]
    if not backend.refusal(spec.precision):
        ways = ["`--operators auto`"]
    raise DeviceError(
        f"{backend.name} does not compute with `--precision {spec.precision}`: {why}",
        hint=f"pass {' or '.join(ways)}; `--operators aten` widens the weights",
    )


def check_rounding(spec: CaptionerSpec, precision: Precision) -> None:
    """Raise UsageError if inputs of 8-bit layers are to be rounded and the loaded weights are of another precision."""
    if spec.operators == "w8a8" and precision != "int8":
        raise UsageError(
            f"`--operators w8a8` needs 8-bit weights, and those of the model are {precision}",
            hint="add `--precision int8`",
        )
