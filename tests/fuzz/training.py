"""What a resumed training reads back: it is used as it was written, or refused with a sentence and left unchanged."""

import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.checkpoint import (
    LoopState,
    TrainingError,
    check_resumable,
    read_checkpoint,
    weight_shapes,
    weights_of,
    write_checkpoint,
)
from llama_adapter.app.learning.training.results import DATA, require_same_run
from llama_adapter.app.learning.training.run_log import COLUMNS, LOG, RunLog, _column, read_log
from llama_adapter.app.learning.training.stepping import NamedAdamW
from llama_adapter.runtime.errors import CheckpointError, UsageError
from tests.fuzz.mutators import either, flipped, mutated_bytes, mutated_json, mutated_lines, mutated_safetensors, words
from tests.fuzz.target import Mutator, Target, refused, scratch

_DIGEST, _SHAPE, _RUN, _FROM_STEP = "ab" * 32, (2, 3), "0" * 64, 2


def _folder(name: str) -> Path:
    place = scratch() / name
    place.mkdir(exist_ok=True)
    return place


def checkpoint(data: bytes) -> str:
    """`last.safetensors`. If it is accepted, a step can be made from it, and it is written again unchanged."""
    path = _folder("run") / "last.safetensors"
    path.write_bytes(data)
    parameters, optimiser = _begun()
    weights, moments = weight_shapes(parameters), optimiser.shapes()
    try:
        tensors, state = read_checkpoint(path)
        check_resumable(tensors, state, weights=weights, moments=moments, path=path)
    except CheckpointError as error:
        return refused(error)
    with torch.no_grad():
        for name, tensor in weights_of(tensors).items():
            parameters[name].copy_(tensor)
    if moments.keys() <= tensors.keys():
        optimiser.load_state({name: tensors[name] for name in moments})
    if state.scaler:
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(state.scaler)
        scaler.scale(torch.ones(()))
        scaler.update(1.0)
    _step(parameters, optimiser)
    write_checkpoint(path, tensors, state)
    again, read = read_checkpoint(path)
    assert read == state
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    return f"ok {len(tensors)} {state.step == state.num_steps} {bool(state.scaler)}"


def log(data: bytes) -> str:
    """`log.csv`. A resumed run keeps the rows up to its checkpoint."""
    path = _folder("logged") / LOG
    path.write_bytes(data)
    try:
        before = read_log(path)
        RunLog(path.parent, from_step=_FROM_STEP).close()
    except TrainingError as error:
        assert path.read_bytes() == data, "a file that is refused was changed"
        return refused(error)
    after = read_log(path)
    assert after == [row for row in before if int(row["step"]) <= _FROM_STEP]
    for name in COLUMNS:
        _column(after, name)
    return f"ok {min(len(before), 5)} {min(len(after), 5)}"


def data_of_run(data: bytes) -> str:
    """`data.json`."""
    path = _folder("data") / DATA
    path.write_bytes(data)
    try:
        require_same_run(path.parent, _RUN)
    except UsageError as error:
        return refused(error)
    return "ok"


def encoding(data: bytes) -> str:
    """A file of the cache of encodings: exactly what was written, or encoded again."""
    cache = _open_cache()
    path = cache._path(_DIGEST)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    is_there = not cache.missing([_DIGEST])
    if is_there:
        assert torch.equal(cache.get(_DIGEST), _encoded()), "other numbers are taken"
    cache.put(_DIGEST, _encoded())
    assert torch.equal(_open_cache().get(_DIGEST), _encoded())
    return f"ok {is_there} {len(data) == path.stat().st_size}"


def _open_cache() -> EncodedCache:
    return EncodedCache(_folder("encoded"), encoder="a", shape=_SHAPE, dtype=torch.bfloat16)


def _encoded() -> Tensor:
    return torch.arange(6, dtype=torch.bfloat16).reshape(_SHAPE)


# Small good files.


def _begun() -> tuple[dict[str, nn.Parameter], NamedAdamW]:
    parameters = {"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    return parameters, NamedAdamW(parameters, no_decay=("b",), weight_decay=0.1)


def _step(parameters: Mapping[str, nn.Parameter], optimiser: NamedAdamW) -> None:
    for one in parameters.values():
        one.grad = torch.ones_like(one)
    optimiser.set_rate(1e-3)
    optimiser.torch.step()


@cache
def _checkpoints() -> dict[str, bytes]:
    parameters, optimiser = _begun()
    path, made = _folder("made") / "last.safetensors", {}
    scaler = torch.amp.GradScaler("cpu").state_dict()
    best = {"best": [0.5, -1.25], "best_step": 1, "least_loss": 1.25, "elapsed_s": 0.5}
    for name, state in {
        "skipped": LoopState(step=2, num_steps=6, run=_RUN, num_examples=16, skipped=[1, 2]),
        "stepped": LoopState(step=3, num_steps=6, run=_RUN, num_examples=24, skipped=[2], **best),
        "half": LoopState(step=3, num_steps=6, run=_RUN, num_examples=24, scaler=scaler, **best),
    }.items():
        if name != "skipped":
            _step(parameters, optimiser)
        weights = {f"weight/{one}": tensor for one, tensor in parameters.items()}
        write_checkpoint(path, weights | optimiser.state(), state)
        made[name] = path.read_bytes()
    return made


def _logs() -> dict[str, bytes]:
    header, row = ",".join(COLUMNS), "0.5,2.5,0.001,nan,10,300,0.1,,"
    lines = [header, "0,,,,,,,,6.25,0.5", *(f"{step},{row}" for step in (1, 2, 3))]
    return {"whole": "".join(f"{line}\r\n" for line in lines).encode(), "torn": "\r\n".join(lines).encode()[:-9]}


def _encodings() -> dict[str, bytes]:
    cache = _open_cache()
    cache.put(_DIGEST, _encoded())
    return {"whole": cache._path(_DIGEST).read_bytes()}


_mutated_state = mutated_json(
    *words("step num_steps run best best_step least_loss num_worse skipped elapsed_s num_examples scaler"),
    *words("scale growth_factor backoff_factor growth_interval _growth_tracker"),
    *([], {}, [1, 2], 0, 1, 2, 3, 6, -1, 0.5, 10**12, 2**53, float("nan"), float("inf")),
)


def _mutated_metadata(data: bytes, random: Random) -> bytes:
    """Mutate the state, which is JSON in a text of the header's JSON."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        state = _mutated_state(header["__metadata__"]["state"].encode(), random)
        header["__metadata__"]["state"] = state.decode(errors="replace")
        changed = json.dumps(header).encode()
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return flipped(data, random)
    return struct.pack("<Q", len(changed)) + changed + data[8 + size :]


_header = mutated_safetensors(
    mutated_json(
        *words("F16 F32 F64 I8 I64 BOOL dtype shape data_offsets __metadata__ state format"),
        *words("weight/a weight/b exp_avg/a exp_avg_sq/a exp_avg_sq/b step/a step/c"),
        *([], [1], [6], [2, 3], [3, 2], [4], [2**63], [0, 24], [0, 4]),
    )
)
_cells = mutated_bytes(*"step loss nan inf -1 1e999 0x1 ²".encode().split(), b",", b'"', b"\r", b"\xff", b"9" * 30)
_ROWS: tuple[tuple[str, str, Callable[[bytes], str], Callable[[], Mapping[str, bytes]], Mutator], ...] = (
    (
        *("training-checkpoint", "last.safetensors of a training run", checkpoint, _checkpoints),
        either(_mutated_metadata, _mutated_metadata, _header, flipped),
    ),
    ("training-log", "log.csv of a training run", log, _logs, either(_cells, mutated_lines(_cells))),
    (
        *("training-data", "data.json of a training run", data_of_run),
        lambda: {"same": json.dumps({"run": _RUN, "digest": _RUN, "parts": {}}).encode()},
        mutated_json(*words("run digest parts"), _RUN, None, 1),
    ),
    ("training-encoding", "a file of the cache of encodings", encoding, _encodings, either(flipped, _header)),
)
TARGETS = tuple(
    Target(name=name, about=about, run=run, seeds=seeds, mutate=mutate, max_bytes=2**16, quick_rounds=60)
    for name, about, run, seeds, mutate in _ROWS
)
