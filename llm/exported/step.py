"""Inputs and outputs of the graphs of an exported decoder: names of their ports, and the arrays of a step.

One graph computes every step. A step feeds S tokens to each of R rows: all tokens of a prompt, one token of an answer,
or a prompt with the continuations to score. The mask determines which tokens each token attends to.
"""

# R rows, S step tokens, P cached positions, T wanted tokens, A adapter layers, L layers, B pictures, Q queries, D width

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.runners.base import Pictures, to_compute
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.llm.runners.host import as_array
from llama_adapter.llm.runners.score_layout import ScoreLayout, layout_mask, layout_positions
from llama_adapter.llm.runners.shapes import padded

IDS: Final = "ids"  # int32 (R, S); below 0 for tokens whose embeddings are given
# (R, S, D), only in graphs for pictures as tokens. It has the sizes of IDS, so that gears need no further size.
EMBEDDINGS: Final = "embeddings"
POSITIONS: Final = "positions"  # int32 (R, S), of the rotary embedding
PLACES: Final = "places"  # int32 (R, S), where keys and values are stored; only in graphs that store them
MASK: Final = "mask"  # bool (R, S, P), or (R, S, P + S) if the step's own tokens are not in the cache
WANTED: Final = "wanted"  # int32 (T,), row * S + place of each token whose logits are computed
# (T,), float32, and int32 for top_k; temperature 0: greedy
SAMPLING: Final = ("temperature", "top_p", "top_k", "uniform")
TOKENS: Final = "tokens"  # int32 (T,), -1 if logits are not finite
LOGITS: Final = "logits"  # float32 (T, V)
SOURCE: Final = "source"  # SOURCE and TARGET: int64 (1,), slots of the graph that copies one slot over another
TARGET: Final = "target"
VISUAL_QUERY: Final = "visual_query"  # (B, Q, D)
_GIVEN: Final = -1  # id of a token whose embedding is given


def num_prefix_layers(config: DecoderConfig) -> int:
    """Number of layers with prefix ports: 0 if there are no queries."""
    return config.num_adapter_layers if config.num_queries else 0


def layer_ports(name: str, num_layers: int) -> list[str]:
    """Names of the ports of each layer, `k` and `v` in turn: `cache_k_00`, `cache_v_00`, `cache_k_01`, ..."""
    return [f"{name}_{part}_{layer:02}" for layer in range(num_layers) for part in "kv"]


def stacked_ports(name: str) -> list[str]:
    """Names of the ports of all layers together: `cache_k`, `cache_v`."""
    return [f"{name}_k", f"{name}_v"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The arrays of one step. `mask_RSP` covers the places of the cache, in which the step's tokens are stored too."""

    ids_RS: np.ndarray
    positions_RS: np.ndarray
    places_RS: np.ndarray
    mask_RSP: np.ndarray
    wanted_T: np.ndarray
    draws: Sequence[Draw | None]  # of the wanted tokens; None is greedy
    pictures: Sequence[Pictures] = ()  # of each row, at their places in it; may be empty if no row has any

    def embedded(self, *, dim: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of IDS and EMBEDDINGS. Embeddings of tokens that have an id are zero, and not read."""
        num_rows, num_tokens = self.ids_RS.shape
        ids_RS, x_RSD = self.ids_RS.copy(), np.zeros((num_rows, num_tokens, dim), dtype)
        for ids_S, x_SD, own in zip(ids_RS, x_RSD, self.pictures, strict=False):  # most steps have no pictures
            for picture in own:
                ids_S[picture.start : picture.stop] = _GIVEN
                x_SD[picture.start : picture.stop] = as_array(picture.embeddings_SD)
        return ids_RS, x_RSD

    @property
    def sampling(self) -> tuple[np.ndarray, ...]:
        """The arrays of SAMPLING."""
        draws = [Draw(0.0, 1.0, 0, 0.0) if draw is None else draw for draw in self.draws]
        temperature, top_p, uniform = (
            np.array([getattr(draw, name) for draw in draws], np.float32)
            for name in ("temperature", "top_p", "uniform")
        )
        top_k = np.array([min(draw.top_k, np.iinfo(np.int32).max) for draw in draws], np.int32)
        return temperature, top_p, top_k, uniform


def prefill_step(
    prompts: Sequence[Sequence[int]],
    draws: Sequence[Draw | None],
    *,
    capacity: int,
    start: int = 0,
    pictures: Sequence[Pictures] = (),
    known: Sequence[int] = (),
) -> Step:
    """All tokens of each prompt, at places from `start` on. Each token attends to earlier tokens and to itself.

    Padding follows a prompt and repeats its last token, so that no value is NaN. `capacity` is P. The first `known`
    tokens of each prompt are in its slot already, and are left out; only a program that `keeps_prompts` takes any.
    """
    known = known or [0] * len(prompts)
    rest, own = zip(*to_compute(prompts, pictures, known), strict=True)
    width = max(map(len, rest))
    ids_RS = np.array(padded(rest, width), np.int32)
    # Padding behind a known beginning stays within the places that the longest prompt has.
    last = start + max(map(len, prompts)) - 1
    places_RS = np.minimum(start + np.array(known)[:, None] + np.arange(width), last).astype(np.int32)
    return Step(
        ids_RS=ids_RS,
        positions_RS=places_RS,
        places_RS=places_RS,
        mask_RSP=np.arange(capacity) <= places_RS[..., None],
        wanted_T=np.array([row * width + len(prompt) - 1 for row, prompt in enumerate(rest)], np.int32),
        draws=draws,
        pictures=own,
    )


def decode_step(
    token_ids: Sequence[int], positions: Sequence[int], draws: Sequence[Draw | None], *, capacity: int, start: int = 0
) -> Step:
    """One token of each row at its position, counted from place `start`."""
    places_R1 = start + np.array(positions, np.int32)[:, None]
    return Step(
        ids_RS=np.array(token_ids, np.int32)[:, None],
        positions_RS=places_R1,
        places_RS=places_R1,
        mask_RSP=(np.arange(capacity) <= places_R1)[:, None],
        wanted_T=np.arange(len(positions), dtype=np.int32),
        draws=draws,
    )


def score_step(layouts: Sequence[ScoreLayout], *, start: int = 0) -> Step:
    """Prompts with their continuations, one row each, at places from `start` on.

    The wanted tokens are the predictors of all targets.
    """
    width = max(len(layout.token_ids) for layout in layouts)
    ids_RS = np.array(padded([layout.token_ids for layout in layouts], width), np.int32)
    positions = [layout_positions(layout, start=start) for layout in layouts]
    wanted = [row * width + place for row, layout in enumerate(layouts) for place in layout.predictors]
    return Step(
        ids_RS=ids_RS,
        positions_RS=np.array(padded(positions, width), np.int32),
        places_RS=np.broadcast_to(np.arange(start, start + width, dtype=np.int32), ids_RS.shape),
        mask_RSP=np.stack([layout_mask(layout, width, start=start) for layout in layouts]),
        wanted_T=np.array(wanted, np.int32),
        draws=[None] * len(wanted),
        pictures=[layout.pictures for layout in layouts],
    )
