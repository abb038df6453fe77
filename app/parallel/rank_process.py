"""The process of a rank that is not the first: it joins, loads its share, follows commands, and ends."""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import torch

from llama_adapter import __version__
from llama_adapter.app.models.memory_fit import engine_config
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.app.parallel.cores import bind_to
from llama_adapter.app.parallel.fingerprint import files_fingerprint, fingerprints
from llama_adapter.app.parallel.launch import Launched, checked_launch
from llama_adapter.app.parallel.rendezvous import (
    SECONDARY,
    Beats,
    environment_store,
    error_key,
    find_store,
    followed_key,
    join,
    leave,
)
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.parallel.follower import follow
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError, Ranks


def main(descriptor: str, started: str) -> None:
    """Entry point of a process that the first rank started; `started` has its parameters as JSON."""
    values = json.loads(started)
    os.close(int(descriptor))  # this rank communicates through the store and the process groups instead
    if values["cores"] is not None:
        bind_to(values["cores"])
    store = find_store(values["port"], values["size"])
    sys.exit(
        _live(
            store,
            values["rank"],
            values["size"],
            device=values["device"],
            timeout_s=values["timeout_s"],
            is_launched=False,
        )
    )


def run_launched(place: Launched, spec: CaptionerSpec) -> int:
    """As `main`, for a process that `torchrun` started with the first rank's command line; returns the exit code."""
    checked_launch(spec.tensor_parallel)
    kind = open_backend(AUTO).device.type if spec.device == AUTO else spec.device.partition(":")[0]
    return _live(
        environment_store(place, timeout_s=spec.parallel_timeout),
        place.rank,
        place.size,
        device="cpu" if kind == "cpu" else f"{kind}:{place.local_rank}",
        timeout_s=spec.parallel_timeout,
        is_launched=True,
    )


def _live(store: Any, rank: int, size: int, *, device: str, timeout_s: float, is_launched: bool) -> int:
    beats = Beats(store, rank, is_launched=is_launched)
    try:
        _say(store, "hello", rank, {"llama-adapter": __version__, "torch": torch.__version__})
        backend = open_backend(device)
        collectives = backend.capabilities.collectives
        ranks, channel = join(
            store,
            rank=rank,
            size=size,
            collectives=collectives,
            timeout_s=timeout_s,
            device=backend.device,
            are_local=not is_launched,
        )
        _serve(store, ranks, channel, device=device)
    except CollectiveError:  # another rank ended; the first rank reports which
        with suppress(RuntimeError):
            store.set(followed_key(rank), "")
        return SECONDARY
    except BaseException as error:
        problem = describe(error)
        with suppress(RuntimeError):
            store.set(error_key(rank), json.dumps({"sentence": problem.sentence, "hint": problem.hint}))
        return 1
    finally:
        beats.end()
        with suppress(RuntimeError):
            leave()
    return 0


def _serve(store: Any, ranks: Ranks, channel: Channel, *, device: str) -> None:
    command = channel.receive()
    spec = CaptionerSpec(**{**command["spec"], "device": device})
    backend, dtype = open_backend(device), DTYPES[spec.dtype]
    if command["random"] is None:
        model, tensors = stream_model(spec, dtype=dtype, is_encoded_elsewhere=True, ranks=ranks)
    else:
        model, tensors = RandomLoader(**command["random"])(dtype, ranks)
    config = engine_config(model, spec, ranks)
    model.vision_state.clear()  # only the first rank encodes pictures
    decoder = place_decoder(config, tensors, backend=backend, ranks=ranks)
    files = files_fingerprint(model, spec)
    _say(store, "loaded", ranks.rank, fingerprints(decoder.decoder, files=files, past=config.past))
    runner = decoder.runner(channel.receive()["num_slots"])
    _say(store, "ready", ranks.rank, {})
    follow(runner, channel)


def _say(store: Any, key: str, rank: int, values: dict[str, Any]) -> None:
    store.set(f"{key}/{rank}", json.dumps(values))
