"""The number formats that a model computes in: its dtype, given or the best one, and the precision of its weights.

The best dtype is one in which the model fits into memory, so `memory_plans` is here, and not in memory_fit.py.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.app.models.dtype_rule import best_type
from llama_adapter.app.models.exported import encoder_files
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.memory_plan import MemoryPlan, planner
from llama_adapter.runtime.devices import DTYPES, Backend, resolve_dtype
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, OperatorChoice, Precision
from llama_adapter.runtime.schemes.scheme import dtype_name, find_scheme


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The values that decide the choice of a dtype. They are known before weights are read."""

    decoder: DecoderConfig
    num_encoder_weights: int
    precision: Precision  # of the linear layers' weights
    finer_weights: Mapping[str, Precision] | None = None  # see `linear_precisions`
    packed_in: torch.dtype | None = None  # the dtype of packed float weights that can be used as they are


Dtype = torch.dtype | Callable[[ModelSizes], torch.dtype]  # a dtype, or a function that chooses one


def dtype_of(
    dtype: Dtype,
    *,
    decoder: DecoderConfig,
    encoder: Iterable[Tensor],
    precision: Precision = FLOAT,
    finer_weights: Mapping[str, Precision] | None = None,
    packed_in: torch.dtype | None = None,
) -> torch.dtype:
    """A given dtype itself; otherwise the dtype chosen for a model with this decoder and these encoder tensors."""
    if isinstance(dtype, torch.dtype):
        return dtype
    num_encoder_weights = sum(tensor.numel() for tensor in encoder)
    sizes = ModelSizes(
        decoder=decoder,
        num_encoder_weights=num_encoder_weights,
        precision=precision,
        finer_weights=finer_weights,
        packed_in=packed_in,
    )
    return dtype(sizes)


class DtypeChoice:
    """Chooses the dtype for a spec on a device, when it is called with the sizes of the model."""

    def __init__(self, spec: CaptionerSpec, *, backend: Backend, mode: str) -> None:
        """Raises DeviceError if the spec names a dtype that the device lacks."""
        self.reason = ""  # the reason of the choice, for the user; set by the call
        self._spec, self._backend, self._mode = spec, backend, mode
        self._given = None if spec.dtype == AUTO else resolve_dtype(spec.dtype, backend=backend)

    def __call__(self, sizes: ModelSizes) -> torch.dtype:
        """The given dtype; with `auto`, the best dtype with which the model fits into the device's memory."""
        if self._given is not None:
            return self._given
        if sizes.packed_in is not None:
            self.reason = "its weights are packed in it"
            return sizes.packed_in
        name, self.reason = self._best(sizes)
        if DTYPES[name].itemsize > 2 and (free := self._backend.free_bytes()) is not None:
            needed = self.needed_bytes(sizes, name)
            halves = [other for other in self._backend.capabilities.dtypes if DTYPES[other].itemsize == 2]
            if needed > free and (half := next((one for one in halves if self.needed_bytes(sizes, one) <= free), "")):
                self.reason = f"{name} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
                name = half
        return DTYPES[name]

    def _best(self, sizes: ModelSizes) -> tuple[str, str]:
        """The fastest dtype with acceptable errors, and the reason for it."""
        capabilities = self._backend.capabilities
        first, large = capabilities.dtypes[0], capabilities.large_dtype
        if first != "float32":
            return first, "the best type of this device"
        decoder = expected_forms(sizes.decoder, dtype=torch.float32)
        num_weights = sizes.num_encoder_weights + sum(math.prod(form.shape) for form in decoder.values())
        is_taken = self._backend.computes_in(sizes.precision, DTYPES[first], wanted=self._spec.operators)
        return best_type(num_weights, large=large, has_few_bits=sizes.precision != FLOAT and is_taken)

    def needed_bytes(self, sizes: ModelSizes, name: str) -> int:
        """Memory for the model in this dtype, with the batch size of the spec, or with one row if that is `auto`."""
        spec, dtype = self._spec, DTYPES[name]
        config = EngineConfig(decoder=sizes.decoder, dtype=dtype, mode=self._mode, operators=spec.operators)
        encoder_bytes = sizes.num_encoder_weights * dtype.itemsize
        plan = memory_plans(
            config,
            spec,
            precision=sizes.precision,
            finer_weights=sizes.finer_weights,
            encoder_bytes=encoder_bytes,
            backend=self._backend,
        )
        return plan(1 if spec.batch_size == AUTO else spec.batch_size).total


def memory_plans(
    config: EngineConfig,
    spec: CaptionerSpec,
    *,
    precision: Precision,
    finer_weights: Mapping[str, Precision] | None,
    encoder_bytes: int,
    backend: Backend,
) -> Callable[[int], MemoryPlan]:
    """A function from a number of rows to the memory plan of a model, with the encoder that `spec` names.

    `finer_weights` are those of `linear_precisions`. `encoder_bytes` are those of the model's own encoder. An exported
    one counts only if it is on the decoder's device.
    """
    if spec.encoder is not None:
        is_here = spec.vision_kind == "om" and backend.capabilities.runs_om
        encoder_bytes = sum(file.stat().st_size for file in encoder_files(spec)) if is_here else 0
    forms = expected_forms(config.decoder, dtype=config.dtype, precision=precision, finer_weights=finer_weights)
    return planner(config, forms, backend=backend, reserved=encoder_bytes)


def best_dtype(num_weights: int, backend: Backend) -> torch.dtype:
    """The best dtype for a model of this size whose language model is not available, or not computed here."""
    first, large = backend.capabilities.dtypes[0], backend.capabilities.large_dtype
    return DTYPES[best_type(num_weights, large=large, has_few_bits=False)[0] if first == "float32" else first]


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
