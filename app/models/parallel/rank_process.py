"""The process of a rank that is not the first: it joins, loads its share, follows commands, and ends."""

import json
import sys
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, and not in __all__

from llama_adapter import __version__
from llama_adapter.app.models.memory_fit import engine_config
from llama_adapter.app.models.parallel.cores import bind_to
from llama_adapter.app.models.parallel.fingerprint import files_fingerprint, fingerprints
from llama_adapter.app.models.parallel.launch import Launched, checked_launch
from llama_adapter.app.models.parallel.messages import SentMessages
from llama_adapter.app.models.parallel.rendezvous import (
    FIRST_DEVICE,
    SECONDARY,
    Beats,
    device_of,
    environment_store,
    error_key,
    followed_key,
    join,
    leave,
)
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.parallel.follower import follow
from llama_adapter.runtime.devices import DTYPES, Backend, open_backend
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError, Ranks


def main(descriptor: str, started: str) -> None:
    """Entry point of a process that the first rank started; `started` has its parameters as JSON."""
    values = json.loads(started)
    if values["cores"] is not None:
        bind_to(values["cores"])
    place = Launched(rank=values["rank"], size=values["size"], local_rank=values["rank"], is_local=True)
    messages, store = SentMessages(int(descriptor)), FileStore(values["store"], place.size)
    sys.exit(_live(messages, store, place, timeout_s=values["timeout_s"], is_launched=False))


def run_launched(place: Launched, spec: CaptionerSpec) -> int:
    """As `main`, for a process that `torchrun` started with the first rank's command line; returns the exit code."""
    checked_launch(spec.tensor_parallel)
    store = environment_store(place, timeout_s=spec.parallel_timeout)
    return _live(store, store, place, timeout_s=spec.parallel_timeout, is_launched=True)


def _live(messages: Any, store: Any, place: Launched, *, timeout_s: float, is_launched: bool) -> int:
    """The life of a rank; returns its exit code. `messages` go to the first rank, and groups join through `store`."""
    rank = place.rank
    beats = Beats(messages, rank, is_launched=is_launched)
    try:
        _say(messages, "hello", rank, {"llama-adapter": __version__, "torch": torch.__version__})
        backend = open_backend(device_of(place, store.get(FIRST_DEVICE).decode()))
        collectives = backend.capabilities.collectives
        ranks, channel = join(store, place, collectives=collectives, timeout_s=timeout_s, device=backend.device)
        _serve(messages, ranks, channel, backend=backend)
    except CollectiveError:  # another rank ended; the first rank reports which
        with suppress(RuntimeError):
            messages.set(followed_key(rank), "")
        return SECONDARY
    except BaseException as error:
        problem = describe(error)
        with suppress(RuntimeError):
            messages.set(error_key(rank), json.dumps({"sentence": problem.sentence, "hint": problem.hint}))
        return 1
    finally:
        beats.end()
        with suppress(RuntimeError):
            leave()
    return 0


def _serve(messages: Any, ranks: Ranks, channel: Channel, *, backend: Backend) -> None:
    command = channel.receive()
    spec = CaptionerSpec(**{**command["spec"], "device": str(backend.device)})
    dtype = DTYPES[spec.dtype]
    if command["random"] is None:
        model, tensors = stream_model(spec, dtype=dtype, is_encoded_elsewhere=True, ranks=ranks)
    else:
        model, tensors = RandomLoader(**command["random"])(dtype, ranks)
    config = engine_config(model, spec, ranks)
    model.vision_state.clear()  # only the first rank encodes pictures
    decoder = place_decoder(config, tensors, backend=backend, ranks=ranks)
    files = files_fingerprint(model, spec)
    _say(messages, "loaded", ranks.rank, fingerprints(decoder.decoder, files=files, past=config.past))
    runner = decoder.runner(**channel.receive()["cache"])
    _say(messages, "ready", ranks.rank, {})
    follow(runner, channel)


def _say(messages: Any, key: str, rank: int, values: dict[str, Any]) -> None:
    messages.set(f"{key}/{rank}", json.dumps(values))
