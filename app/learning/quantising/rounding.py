"""Rounds a model's linear layers according to their inputs, in one pass of all samples through encoder and decoder.

With 4 bits, the inputs decide how weights are rounded; with 8 bits, their largest magnitude is the scale of inputs.

Each layer is rounded when its inputs arrive, and then computes with the rounded weight. So later layers get inputs from
rounded layers, and only one weight at a time is in float32. Activations of all samples are in memory together.
"""

# B samples, S tokens, H x W x C pixels, Q queries, D model width, I inputs

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.app.models.checkpoints import LoadedModel, Origin
from llama_adapter.app.models.quantised_model import require_float
from llama_adapter.app.models.sketch import sketch
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.balancing import balanced, read_norms
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE
from llama_adapter.runtime.schemes.scheme import Parts, Scheme, find_scheme
from llama_adapter.runtime.schemes.state import linear_precisions, linear_weights, new_finer_weights
from llama_adapter.vision.encoder import encoder_from_state

_SAMPLES_AT_ONCE = 16  # observed together

Progress = Callable[[int, int], None]  # called with the number of rounded layers and of all layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A picture's pixels for the encoder, uint8 (H, W, 3), and the tokens of its question and answer."""

    pixels: np.ndarray
    token_ids: tuple[int, ...]  # prompt and answer
    num_prompt_tokens: int


@torch.inference_mode()
def round_model(
    model: LoadedModel,
    samples: Sequence[Sample],
    *,
    dtype: torch.dtype,
    precision: Precision,
    progress: Progress = lambda done, all: None,
) -> tuple[LoadedModel, Iterator[tuple[str, Tensor]]]:
    """As `quantise_model`, but rounded for the layer inputs that the samples give. It computes in float32 on the CPU.

    Raises the CheckpointError of `quantise_model`.
    """
    require_float(model)
    linears = [linear_weights(sketch(config)) for config in (model.vision_config, model.decoder_config)]
    num_layers, rounded = sum(map(len, linears)), 0

    def count() -> None:
        nonlocal rounded
        rounded += 1
        progress(rounded, num_layers)

    norms = read_norms(sketch(model.vision_config))
    plain_state = dict(balanced(model.vision_state.items(), norms, dtype=dtype))
    encoder = encoder_from_state(model.vision_config, _widened(plain_state, linears[0]))
    rounder = _Rounder(encoder, precision, count=count)
    visual_query_BQD = encoder(torch.from_numpy(np.stack([sample.pixels for sample in samples])))
    vision_state = dict(_stored(plain_state, rounder.parts, dtype=dtype))

    decoder = decoder_from_state(model.decoder_config, _widened(model.decoder_state, linears[1]))
    rounder = _Rounder(decoder, precision, count=count)
    tokens_BS, is_token_BS, is_answered_BS = _padded(samples)
    length = tokens_BS.shape[1]
    # The adapter's queries are projected by the layers that also project ordinary tokens, or by separate layers. Layers
    # that also project ordinary tokens are rounded later, when those tokens arrive. Until then, the picture's keys and
    # values are computed with weights that are not rounded.
    with rounder.waiting("layers."):
        prefix = decoder.project_prefix(visual_query_BQD)
    with rounder.only(is_token_BS):
        mask_11SS = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        hidden_BSD = decoder(tokens_BS, torch.arange(length)[None], mask_11SS, prefix)
    with rounder.only(is_answered_BS):
        rounder.round("head", decoder.head, hidden_BSD)
    calibrated = dataclasses.replace(
        model,
        input_scales={name: parts[INPUT_SCALE] for name, parts in rounder.parts.items()} if precision == "int8" else {},
        vision_state=vision_state,
        decoder_state={},
        dtype=dtype,
        precision=precision,
        finer_weights=new_finer_weights(decoder, precision),
        origin=Origin(
            digest=model.digest, fingerprint=fingerprint(model.vision_state), calibration_pictures=len(samples)
        ),
    )
    return calibrated, _stored(model.decoder_state, rounder.parts, dtype=dtype)


def _widened(state: Mapping[str, Tensor], linears: frozenset[str]) -> dict[str, Tensor]:
    """All tensors except linear weights, in float32. Linear weights are widened later, one by one."""
    return {name: tensor if name in linears else tensor.float() for name, tensor in state.items()}


def _stored(
    state: Mapping[str, Tensor], parts: Mapping[str, Parts], *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if name in parts:
            yield from ((name + suffix, part) for suffix, part in parts[name].items() if suffix != INPUT_SCALE)
        else:
            yield name, tensor.to(dtype)


def _padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, S) padded at the end, a mask of real tokens, and a mask of positions whose logits choose a token."""
    length = max(len(sample.token_ids) for sample in samples)
    tokens_BS = torch.zeros(len(samples), length, dtype=torch.long)
    is_token_BS, is_answered_BS = tokens_BS.bool(), tokens_BS.bool()
    for row, sample in enumerate(samples):
        tokens_BS[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        is_token_BS[row, : len(sample.token_ids)] = True
        is_answered_BS[row, sample.num_prompt_tokens - 1 : len(sample.token_ids)] = True
    return tokens_BS, is_token_BS, is_answered_BS


class _Rounder:
    """Rounds the linear layers of a module when their inputs arrive. `parts` has the stored tensors of each weight."""

    def __init__(self, module: nn.Module, precision: Precision, *, count: Callable[[], None]) -> None:
        self.parts: dict[str, Parts] = {}
        self._precisions, self._count = linear_precisions(module, precision), count
        self._observed: dict[str, Tensor] = {}
        self._counted_BS: Tensor | None = None
        self._waiting: str | None = None
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(partial(self._before, name))
                layer.register_forward_hook(partial(self._after, layer.weight))

    @contextmanager
    def only(self, counted_BS: Tensor) -> Iterator[None]:
        """During the context, only inputs (B, S, I) at marked positions are counted."""
        self._counted_BS = counted_BS
        yield
        self._counted_BS = None

    @contextmanager
    def waiting(self, prefix: str) -> Iterator[None]:
        """During the context, layers whose names begin with `prefix` only count their inputs; they are not rounded."""
        self._waiting = prefix
        yield
        self._waiting = None

    def round(self, name: str, layer: nn.Linear, x_BSI: Tensor) -> Tensor:
        """Round a layer for these inputs (B, S, I) and those counted before; returns the weight, float32 (out, I)."""
        weight, scheme = layer.weight.float(), find_scheme(self._precisions[f"{name}.weight"])
        observed = self._observe(name, scheme, x_BSI)
        if self._waiting is not None and name.startswith(self._waiting):
            self._observed[name] = observed
            return weight
        assert scheme.calibrate is not None
        try:
            parts = scheme.calibrate(weight, observed)
        except ValueError as error:
            raise CheckpointError(
                f"`{name}` cannot be rounded for these pictures: {error}",
                hint="`llama-adapter doctor` looks at all weights; without --calibrate inputs do not matter",
            ) from None
        self.parts[f"{name}.weight"] = parts
        self._count()
        return scheme.dequantise(parts)

    def _observe(self, name: str, scheme: Scheme, x_BSI: Tensor) -> Tensor:
        assert scheme.observe is not None
        observed = self._observed.pop(name, None)
        for start in range(0, len(x_BSI), _SAMPLES_AT_ONCE):
            part = slice(start, start + _SAMPLES_AT_ONCE)
            x_NI = x_BSI[part].flatten(0, 1) if self._counted_BS is None else x_BSI[part][self._counted_BS[part]]
            observed = scheme.observe(observed, x_NI)
        assert observed is not None, "there are samples"
        return observed

    def _before(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(self.round(name, layer, inputs[0]), requires_grad=False)

    @staticmethod
    def _after(stored: Tensor, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        """Release the float32 weight."""
        assert isinstance(layer, nn.Linear)
        layer.weight = nn.Parameter(stored, requires_grad=False)
