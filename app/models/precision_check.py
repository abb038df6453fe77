"""Checks that a device has operators for a number format of weights, and that `--operators` fits this format."""

import torch

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, OperatorChoice, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name, find_scheme


def check_asked_precision(spec: CaptionerSpec, *, backend: Backend) -> None:
    """Raise DeviceError if `spec` asks for a precision that the device cannot compute with.

    A stored precision that the user did not ask for is no error: the weights are widened, and a note says so.
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
    """Raise UsageError if operators w8a8 are asked for and the loaded weights do not have 8 bits."""
    if spec.operators == "w8a8" and precision != "int8":
        raise UsageError(
            f"`--operators w8a8` needs 8-bit weights, and those of the model are {precision}",
            hint="add `--precision int8`; `encode` takes the weights as stored, so name a bundle of `quantize`",
        )


def widening_note(precision: Precision, dtype: torch.dtype, *, operators: OperatorChoice, backend: Backend) -> str:
    """The note for the user if the device widens stored weights to `dtype`; "" if it computes with them directly."""
    if backend.computes_in(precision, dtype, wanted=operators):
        return ""
    title, why = find_scheme(precision).title, backend.refusal(precision, wanted=operators)
    return f"{title} weights are widened to {dtype_name(dtype)} here, with its memory and speed" + (why and f" ({why})")
