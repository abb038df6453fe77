"""An exported decoder's graphs as OMs with gears: opens them, pads steps of any size to a gear, and stacks layers."""

# R rows, S step tokens, P cached positions, T wanted tokens, N heads, H head size, Q queries, B pictures

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.export import DECODER_FILE, PREFIX_FILE
from llama_adapter.llm.exported.host_program import HostProgram
from llama_adapter.llm.exported.step import EMBEDDINGS, SAMPLING, num_prefix_layers, stacked_ports
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.gears import Gear, shape_in
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.om_dims import OmDimsSession
from llama_adapter.runtime.graphs.session import GraphInfo

DECODER_OM: Final = "decoder.om"
PREFIX_OM: Final = "prefix.om"
_HINT: Final = "export the decoder again"


def open_om_program(
    card: ExportCard, folder: Path, *, device_id: int, num_slots: int, past: PastKeyValues | None = None
) -> tuple[HostProgram, int]:
    """Open the decoder of a folder; also returns the most tokens of a row, including `past`, that its gears allow.

    Raises GraphError if the OMs are missing or were not compiled from the folder's graphs.
    """
    config = card.config
    names = {DECODER_OM: DECODER_FILE, **({PREFIX_OM: PREFIX_FILE} if num_prefix_layers(config) else {})}
    with ExitStack() as stack:
        opened: dict[str, OmDimsSession] = {}
        for name, source in names.items():
            hint = f"compile it: llama-adapter export om {folder / source} --sizes ... (docs/exported-decoder-om.md)"
            if not (folder / name).exists():
                raise GraphError(f"`{folder}` was exported for ATC, and has no `{name}`", hint=hint)
            session = stack.enter_context(closing(OmDimsSession(folder / name, device_id=device_id)))
            if any(card.files.get(file, mark) != mark for file, mark in session.sources.items()):
                raise GraphError(
                    f"`{folder / name}` was compiled from another export than the one in its folder", hint=hint
                )
            opened[name] = session
        step = OmStep(opened[DECODER_OM], config)
        prefix = OmPrefix(opened[PREFIX_OM]) if PREFIX_OM in opened else None
        program = HostProgram(card, prefill=step, increment=step, prefix=prefix, num_slots=num_slots, past=past)
        stack.pop_all()
    # A prompt is one step after the past. The tokens after a prompt attend to a cache.
    num_past = 0 if past is None else len(past)
    return program, min(config.context, num_past + step.most("S", num_cached=num_past), step.most("P") + 1)


class _OmGraph:
    """The part of a `GraphSession` that is the same for all OMs."""

    def __init__(self, session: OmDimsSession) -> None:
        """`close` also closes `session`."""
        self._session = session
        self.info = GraphInfo(
            name=session.name, file=session.file, inputs=session.inputs, outputs=session.outputs, hint=_HINT
        )

    @property
    def device_ms(self) -> float | None:
        """Milliseconds of the last call of the OM only; see `GraphSession.device_ms`."""
        return self._session.device_ms

    def close(self) -> None:
        """See `GraphSession.close`."""
        self._session.close()


class OmStep(_OmGraph):
    """The graph of a step in the form `stacked`, as a `GraphSession` of the form `returned` with dynamic sizes.

    One OM runs steps with and without a cache. In addition to the copy by ais_bench, the host copies the cache from
    arrays per layer into one array for all layers.
    """

    def __init__(self, session: OmDimsSession, config: DecoderConfig) -> None:
        super().__init__(session)
        self._config = config
        self._ports = {port.name: port for port in session.inputs}
        self._num_settings = sum(name in self._ports for name in SAMPLING)
        self._num_embeddings = int(EMBEDDINGS in self._ports)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a step: ids, positions, mask, wanted, settings, and the state: embeddings if the graph takes any,
        prefixes, and cached keys and values if there are any.

        Returns tokens, logits, and the new keys and values of each layer. A step with more rows or wanted tokens than
        any gear is run in parts. Raises GraphError for a row that is longer than every gear, and if ais_bench fails.
        """
        inputs = self._trimmed(inputs)
        if max(len(inputs[0]), len(inputs[3])) > 1 and not self._has_gear(inputs):
            return self._in_parts(inputs)
        ids_RS, positions_RS, mask_RSP, wanted_T, *rest = inputs
        settings, state = rest[: self._num_settings], rest[self._num_settings :]
        embeddings, state = state[: self._num_embeddings], state[self._num_embeddings :]
        num_prefixes = 2 * num_prefix_layers(self._config)
        prefix, cache = state[:num_prefixes], state[num_prefixes:]
        (num_rows, num_tokens), num_wanted = ids_RS.shape, len(wanted_T)
        num_cached = mask_RSP.shape[2] - num_tokens
        gear = self._session.pick(_needed(inputs))
        rows, tokens, cached, wanted = (gear[name] for name in "RSPT")

        mask = np.zeros((rows, tokens, cached + tokens), bool)
        mask[:num_rows, :num_tokens, :num_cached] = mask_RSP[..., :num_cached]
        mask[:num_rows, :num_tokens, cached : cached + num_tokens] = mask_RSP[..., num_cached:]
        places_T = wanted_T // num_tokens * tokens + wanted_T % num_tokens
        outputs = self._session.run(
            [
                _padded(ids_RS, (rows, tokens)),
                _padded(positions_RS, (rows, tokens)),
                mask,
                *(_padded(array, (wanted,)) for array in (places_T.astype(np.int32), *settings)),
                *(_padded(x_RSD, (rows, tokens, self._config.dim)) for x_RSD in embeddings),
                *self._stacked("prefix", prefix, num_rows=num_rows, gear=gear),
                *self._stacked("cache", cache, num_rows=num_rows, gear=gear),
            ]
        )
        tokens_T, logits_TV, *new = outputs
        num_heads = self._config.num_kv_heads
        return [
            tokens_T[:num_wanted],
            logits_TV[:num_wanted],
            *(
                part[:num_rows, layer * num_heads : (layer + 1) * num_heads, :num_tokens]
                for layer in range(self._config.num_layers)
                for part in new
            ),
        ]

    def most(self, name: str, *, num_cached: int = 0) -> int:
        """The largest size of a dynamic dimension in any gear for so many cached positions; 0 if there is none."""
        return max((gear[name] for gear in self._session.gears if gear["P"] >= num_cached), default=0)

    def _trimmed(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inputs without the cache places after the last one that a token attends to."""
        ids_RS, positions_RS, mask_RSP, *rest = inputs
        num_cached = mask_RSP.shape[2] - ids_RS.shape[1]
        cached_RSP, own_RSS = np.split(mask_RSP, [num_cached], axis=2)
        num_used = int(np.flatnonzero(cached_RSP.any((0, 1))).max(initial=-1)) + 1
        # Index of the cache in `rest`.
        first = 1 + self._num_settings + self._num_embeddings + 2 * num_prefix_layers(self._config)
        mask_RSP = np.concatenate([cached_RSP[..., :num_used], own_RSS], axis=2)
        return [ids_RS, positions_RS, mask_RSP, *rest[:first], *(part[:, :, :num_used] for part in rest[first:])]

    def _has_gear(self, inputs: Sequence[np.ndarray]) -> bool:
        return any(all(gear[name] >= size for name, size in _needed(inputs).items()) for gear in self._session.gears)

    def _in_parts(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run the first half of the rows, then the second. A single row is run for each half of its wanted tokens."""
        ids_RS, positions_RS, mask_RSP, wanted_T, *rest = inputs
        settings, state = rest[: self._num_settings], rest[self._num_settings :]
        if len(ids_RS) == 1:
            middle = len(wanted_T) // 2
            (tokens_T, logits_TV, *new), (other_tokens_T, other_logits_TV, *_) = (
                self.run([ids_RS, positions_RS, mask_RSP, *(one[part] for one in (wanted_T, *settings)), *state])
                for part in (slice(0, middle), slice(middle, None))
            )
            return [np.concatenate([tokens_T, other_tokens_T]), np.concatenate([logits_TV, other_logits_TV]), *new]
        num_tokens, results = ids_RS.shape[1], []
        places = []
        middle = len(ids_RS) // 2
        for rows in (slice(0, middle), slice(middle, len(ids_RS))):
            of_rows = wanted_T // num_tokens
            (own_T,) = np.nonzero((of_rows >= rows.start) & (of_rows < rows.stop))
            places.append(own_T)
            own = [ids_RS[rows], positions_RS[rows], mask_RSP[rows], wanted_T[own_T] - rows.start * num_tokens]
            results.append(self.run([*own, *(one[own_T] for one in settings), *(part[rows] for part in state)]))
        order = np.argsort(np.concatenate(places))
        joined = [np.concatenate(parts) for parts in zip(*results, strict=True)]
        return [joined[0][order], joined[1][order], *joined[2:]]

    def _stacked(self, name: str, layers: Sequence[np.ndarray], *, num_rows: int, gear: Gear) -> list[np.ndarray]:
        """k and v of layers in turn, (R, heads, P, H) -> all k and v, padded to a gear, (R, layers * heads, P, H)."""
        stacked = []
        for first, port in enumerate(stacked_ports(name)):
            if (found := self._ports.get(port)) is None:  # a decoder without adapter
                continue
            whole = np.zeros(shape_in(found, gear), found.dtype)
            for layer, part in enumerate(layers[first::2]):
                num_heads = part.shape[1]
                heads = slice(layer * num_heads, (layer + 1) * num_heads)
                whole[:num_rows, heads, : part.shape[2]] = part
            stacked.append(whole)
        return stacked


class OmPrefix(_OmGraph):
    """The graph that projects pictures, as a `GraphSession`. Any number of pictures is padded to a gear, or split."""

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Visual queries (B, Q, D) -> keys and values of the layers in turn, (B, N, Q, H). Raises GraphError."""
        sizes = sorted(gear["B"] for gear in self._session.gears)
        return run_ladder(inputs, sizes, self._session.run)


def _needed(inputs: Sequence[np.ndarray]) -> dict[str, int]:
    """The sizes of a step by the names of the dynamic dimensions."""
    ids_RS, _, mask_RSP, wanted_T, *_ = inputs
    num_rows, num_tokens = ids_RS.shape
    return {"R": num_rows, "S": num_tokens, "P": max(mask_RSP.shape[2] - num_tokens, 1), "T": len(wanted_T)}


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array, padded with zeros at the end of each dimension."""
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded
