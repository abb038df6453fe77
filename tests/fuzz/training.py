"""What a resumed training reads back: it is used as it was written, or refused with a sentence and left unchanged."""

import json
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.checkpoint import (
    LoopState,
    TrainingError,
    check_tensors,
    read_checkpoint,
    weight_shapes,
    weights_of,
    write_checkpoint,
)
from llama_adapter.app.learning.training.results import DATA, require_same_run
from llama_adapter.app.learning.training.run_log import COLUMNS, LOG, RunLog, _column, read_log
from llama_adapter.app.learning.training.stepping import NamedAdamW
from llama_adapter.runtime.errors import CheckpointError, UsageError
from tests.fuzz.mutators import (
    either,
    flipped,
    mutated_bytes,
    mutated_json,
    mutated_lines,
    mutated_metadata,
    mutated_safetensors,
    words,
)
from tests.fuzz.target import Target, refused, scratch, written

_DIGEST, _SHAPE, _RUN, _FROM_STEP = "ab" * 32, (2, 3), "0" * 64, 2


def checkpoint(data: bytes) -> str:
    """`last.safetensors` of a training run.

    If it is accepted, a step can be made from it, and it is written again unchanged.
    """
    path = written("run/last.safetensors", data)
    parameters, optimiser = _begun()
    weights, moments = weight_shapes(parameters), optimiser.shapes()
    try:
        tensors, state = read_checkpoint(path)
        check_tensors(tensors, weights | (moments if state.step > len(state.skipped) else {}), path=path)
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
    """`log.csv` of a training run. A resumed run keeps the rows up to its checkpoint."""
    path = written(f"logged/{LOG}", data)
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
    """`data.json` of a training run."""
    path = written(f"data/{DATA}", data)
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
    return EncodedCache(scratch() / "encoded", encoder="a", shape=_SHAPE, dtype=torch.bfloat16)


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
    path, made = written("made/last.safetensors", b""), {}
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


_state = mutated_metadata(
    *words("step num_steps run best best_step least_loss num_worse skipped elapsed_s num_examples scaler"),
    *words("scale growth_factor backoff_factor growth_interval _growth_tracker"),
    *([], {}, [1, 2], 0, 1, 2, 3, 6, -1, 0.5, 10**12, 2**53, float("nan"), float("inf")),
    only="state",
)


_header = mutated_safetensors(
    mutated_json(
        *words("F16 F32 F64 I8 I64 BOOL dtype shape data_offsets __metadata__ state format"),
        *words("weight/a weight/b exp_avg/a exp_avg_sq/a exp_avg_sq/b step/a step/c"),
        *([], [1], [6], [2, 3], [3, 2], [4], [2**63], [0, 24], [0, 4]),
    )
)
_cells = mutated_bytes(*"step loss nan inf -1 1e999 0x1 ²".encode().split(), b",", b'"', b"\r", b"\xff", b"9" * 30)
_RUN_DATA = json.dumps({"run": _RUN, "digest": _RUN, "parts": {}}).encode()
_target = partial(Target, max_bytes=2**16, quick_rounds=60)
TARGETS = (
    _target("training-checkpoint", checkpoint, _checkpoints, either(_state, _state, _header, flipped)),
    _target("training-log", log, _logs, either(_cells, mutated_lines(_cells))),
    _target(
        *("training-data", data_of_run, lambda: {"same": _RUN_DATA}),
        mutated_json(*words("run digest parts"), _RUN, None, 1),
    ),
    _target("training-encoding", encoding, _encodings, either(flipped, _header)),
)
