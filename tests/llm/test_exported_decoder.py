"""A decoder in ONNX graphs gives the same as torch's, and its card is read as it was written, or refused."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.llm.exported.export import linear_names
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.parity import compare
from llama_adapter.llm.exported.weights_file import GROUP, WeightsFile, quantise_to_8_bits
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import PrefillPlan
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.schemes import QUANTISED
from llama_adapter.runtime.schemes.int8 import quantise_weight
from llama_adapter.runtime.schemes.scheme import find_scheme
from tests.llm import exported, toys
from tests.llm.exported import exported_card, onnx_runner, runner_of
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    FAMILIES,
    answer,
    answers,
    answers_of_all,
    drain,
    eager,
    rounding,
    to_score,
    toy_decoder,
    toy_engine,
    toy_past,
    toy_prompts,
    toy_requests,
)

CONFIGS = {
    "adapter": CONFIG,
    "no adapter": dataclasses.replace(CONFIG, num_adapter_layers=0, num_queries=0),
    "no queries": dataclasses.replace(CONFIG, num_queries=0),
    "adapter everywhere": dataclasses.replace(CONFIG, num_adapter_layers=3, separate_adapter_kv=True),
    **FAMILIES,
}
CHOICES = ((5,), (6, 7, 8), (6, 9) * 4, (5, 7, 9), (7, 8) * 4, (9,) * 8)  # continuations that are scored
SETTINGS = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=1),
    SamplingParams(max_new_tokens=12, temperature=1.5, top_p=0.9, top_k=7, seed=2),
    SamplingParams(max_new_tokens=12, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=1.0, seed=3, repetition_penalty=0.8),
    SamplingParams(max_new_tokens=12, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(max_new_tokens=12, temperature=1.5, min_p=0.1, frequency_penalty=-0.5, seed=4),
    SamplingParams(max_new_tokens=1),
]


# One row; drawn on the host; with a past, and the cache bound as on a device.
@pytest.mark.parametrize(
    ("num_slots", "num_past", "on_device", "sampling", "name"),
    [
        *((1, 0, False, True, name) for name in ("adapter", "windows")),
        *((4, 0, False, False, name) for name in ("adapter", "no adapter", "adapter everywhere", "gemma")),
        *((5, 4, True, True, name) for name in CONFIGS),
    ],
)
@pytest.mark.proves("continuous batching", "ONNX")
@pytest.mark.proves("repetition penalty", "ONNX")
@pytest.mark.proves("presence and frequency penalties, min-p", "ONNX")
@pytest.mark.proves("LLaMA without adapter", "ONNX")
@pytest.mark.proves("float32", "ONNX")
@pytest.mark.proves("choices by scoring", "ONNX")
def test_every_decoder_answers_and_scores_as_in_torch(
    tmp_path: Path, name: str, num_slots: int, num_past: int, on_device: bool, sampling: bool
) -> None:
    config, prompts = CONFIGS[name], toy_prompts(9, longest=20)
    decoder = toy_decoder(config)
    common = {"num_slots": num_slots, "past": toy_past(config, num_past)}
    exported = onnx_runner(decoder, tmp_path, on_device=on_device, sampling=sampling, **common)
    check_answers_and_scores([toy_engine(decoder, **common), Engine(exported, eos_id=EOS_ID)], prompts, config)


def check_answers_and_scores(
    engines: Sequence[Engine], prompts: list[tuple[int, ...]], config: toys.DecoderConfig
) -> None:
    """Two engines give the same answers with pictures, and the same log-probabilities up to rounding."""
    found = []
    for engine in engines:
        sampling = [SETTINGS[row % len(SETTINGS)] for row in range(len(prompts))]
        requests = toy_requests(engine, prompts, sampling=sampling, config=config)
        scores = [to_score(request, CHOICES[: request.id + 1], id=100 + request.id) for request in requests]
        requests = [dataclasses.replace(request, num_logprobs=3) for request in requests]
        # A plan takes consecutive requests of one kind. They are submitted together, so that plans have several rows.
        # The last scores are computed while requests run.
        for submitted in [*scores[:5], *requests, *scores[5:]]:
            engine.submit(submitted)
        outputs = sorted(drain(engine), key=lambda output: output.request_id)
        for output in outputs:
            assert len(output.top) == (0 if output.token_id is None else 3)
            if output.top and output.request_id % len(SETTINGS) in (0, 7):  # greedy, without penalties
                assert output.top[0] == (output.token_id, *output.logprobs)
        found.append(([output.logprobs for output in outputs], answers(outputs)))

    assert found[1][1] == found[0][1]
    for output, wanted, made in zip(outputs, *(logprobs for logprobs, _ in found), strict=True):
        lengths = [len(choice) for choice in CHOICES] if output.request_id >= 100 else [1]
        bounds = [2 * length * rounding(config) for length in lengths[: len(wanted)]]
        assert list(made) == [pytest.approx(one, abs=bound) for one, bound in zip(wanted, bounds, strict=True)]


@pytest.mark.parametrize("on_device", [False, True], ids=["cache in numpy", "cache bound as on a device"])
def test_the_cache_grows_and_rows_that_move_keep_what_they_have(tmp_path: Path, on_device: bool) -> None:
    config = dataclasses.replace(CONFIG, context=300)
    decoder = toy_decoder(config)
    prompts = toy_prompts(6, longest=120)
    # No token is an end token, so that answers pass each doubling of the cache.
    sampling = [SamplingParams(max_new_tokens=count) for count in (150, 3, 60, 170, 10, 90)]
    engines = [
        toy_engine(decoder, num_slots=4, eos_id=-1),
        Engine(onnx_runner(decoder, tmp_path, num_slots=4, on_device=on_device), eos_id=-1),
    ]

    wanted, made = answers_of_all(engines, prompts, sampling=sampling, config=config)

    assert made == wanted


# Linear layers are rounded alike in every family. In float32, answers and scores are compared above.
@pytest.mark.parametrize(
    ("config", "precision"),
    [
        *((CONFIG, precision) for precision in ("float32", "float16", "int8", "int4")),
        *((config, "float16") for config in FAMILIES.values()),
    ],
)
def test_logits_differ_by_rounding_only(tmp_path: Path, config: toys.DecoderConfig, precision: str) -> None:
    decoder = toy_decoder(config)
    runner = onnx_runner(decoder, tmp_path, num_slots=3, precision=precision)
    limits = {
        "float32": rounding(config),
        "float16": 2 * rounding(config, dtype=torch.float16),  # of activations, and of weights
        "int8": 0.6,  # integers of 8 and 4 bits, where the logits' standard deviation is 3
        "int4": 6.0,
    }

    parity = compare(runner.program, eager(decoder, num_slots=3))

    assert parity.max_abs < limits[precision]
    assert parity.is_ok(precision)
    assert parity.num_same == parity.num_tokens or precision in ("int8", "int4")


def test_all_graphs_read_one_weights_file(tmp_path: Path) -> None:
    decoder = toy_decoder()
    onnx_runner(decoder, tmp_path, num_slots=1)

    used = set()
    for name in ("decoder.onnx", "prefix.onnx"):
        model = onnx.load(tmp_path / name, load_external_data=False)
        for tensor in model.graph.initializer:
            used |= {(entry.key, entry.value) for entry in tensor.external_data if entry.key == "location"}
    state_bytes = sum(tensor.numel() * 4 for tensor in decoder.state_dict().values())

    assert used == {("location", "decoder.weights")}
    assert state_bytes <= (tmp_path / "decoder.weights").stat().st_size < state_bytes * 1.02


def test_8_bit_weights_of_a_model_stay_exactly_what_they_are(tmp_path: Path) -> None:
    decoder = toy_decoder()
    state, plain = {}, decoder.state_dict()
    for name, tensor in plain.items():
        if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight", "head.weight")):
            state[name], state[f"{name}_scale"] = quantise_weight(tensor)
            plain[name].copy_(state[name].float() * state[f"{name}_scale"][:, None])
        else:
            state[name] = tensor
    decoder.load_state_dict(plain)
    decoder.state_dict = lambda: state  # type: ignore[method-assign, assignment, return-value]
    runner = onnx_runner(decoder, tmp_path / "int8", num_slots=3, precision="int8")
    widened = onnx_runner(decoder, tmp_path / "float32", num_slots=3)
    del decoder.state_dict

    assert compare(widened.program, eager(decoder, num_slots=3)).max_abs < rounding()
    assert compare(runner.program, eager(decoder, num_slots=3)).max_abs < 0.6  # its activations are rounded to 8 bits


def test_the_head_beside_4_bits_has_8_unless_it_is_stored_in_4(tmp_path: Path) -> None:
    decoder = toy_decoder()
    state = decoder.state_dict()
    weights: dict[str, Tensor] = {name: state[name] for name in linear_names(CONFIG)}
    kept = {name: find_scheme(name).quantise(state["head.weight"]) for name in QUANTISED}

    def written(head: Mapping[str, Tensor]) -> tuple[WeightsFile, Path]:
        path = tmp_path / "weights"
        with path.open("wb") as file:
            made = WeightsFile(file, precision="int4")
            stored = {f"head.weight{suffix}": part for suffix, part in head.items()}
            made.write((weights | {"head.weight": stored.pop("head.weight")} | stored).items(), linears=weights)
        return made, path

    for head, bits in (({"": state["head.weight"]}, 8), (kept["int8"], 8), (kept["int4"], 4)):
        made, path = written(head)
        assert {name: one.bits for name, one in made.linears.items()} == dict.fromkeys(weights, 4) | {
            "head.weight": bits
        }
    scales = made.linears["head.weight"].scales
    assert scales is not None
    assert np.array_equal(scales.read(path), kept["int4"]["_scale"].float().numpy())


def test_rounding_to_8_bits_in_groups_is_within_half_a_step() -> None:
    weight_OI = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    weight_OI[2, :32] = 0

    codes, scales = quantise_to_8_bits(weight_OI)
    back_OI = ((codes.astype(np.float32) - 128) * scales[..., None]).reshape(6, -1)[:, :50]

    steps_OI = np.abs(scales).repeat(GROUP, 1)[:, :50]
    # The range is asymmetric: the end opposite to the largest magnitude is one code short.
    assert (np.abs(back_OI - weight_OI) <= 1.001 * steps_OI).all()
    assert np.mean(np.abs(back_OI - weight_OI) <= 0.501 * steps_OI) > 0.99
    assert (back_OI[2, :32] == 0).all()


@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx", "onnx on a device"])
def test_a_row_that_is_not_finite_ends_alone(kind: str, tmp_path: Path) -> None:
    engine = Engine(runner_of(kind, toys.NATIVE, tmp_path, num_slots=2), eos_id=EOS_ID)
    alone = toy_engine(toy_decoder(toys.NATIVE), num_slots=1)
    prompts, sampling = [(1, 5, 9), (1, 7, 4), (1, 8), (1, 9, 9)], [SamplingParams(max_new_tokens=6)] * 4
    wanted = answer(alone, toy_requests(alone, prompts, sampling=sampling, config=toys.NATIVE))

    requests = toy_requests(engine, prompts, sampling=sampling, config=toys.NATIVE)
    requests[1] = dataclasses.replace(requests[1], prefix=Prefix(requests[1].prefix.k, requests[1].prefix.v * np.nan))
    made = answer(engine, requests)

    assert made == {**wanted, 1: ([], "not_finite")}


def test_a_step_without_rows_reads_nothing_and_a_fresh_slot_is_clean(tmp_path: Path) -> None:
    decoder = toy_decoder()
    runner = onnx_runner(decoder, tmp_path, num_slots=2)
    prefixes = runner.project_prefix(toys.toy_visual_queries(2).numpy())
    plan = PrefillPlan(rows=[7, 8], prompts=[(1, 5), (1, 6)], prefixes=prefixes, draws=[None, None], first_slot=0)
    first = runner.run(plan)

    runner.reset()
    assert runner.run(plan) == first
    assert runner.warm_up(prompt_tokens=4, new_tokens=3).programs == 2
    assert all(not whole.any() for whole in runner.program.slots.cache)


def test_weights_that_the_numbers_cannot_hold_are_refused(tmp_path: Path) -> None:
    decoder = toy_decoder()
    decoder.layers[1].feed_forward.down.weight[0, 0] = 1e6  # type: ignore[union-attr, index, operator]
    with pytest.raises(GraphError, match="too large for float16"):
        onnx_runner(decoder, tmp_path, num_slots=1, precision="float16")
    decoder.layers[1].feed_forward.down.weight[0, 0] = float("nan")  # type: ignore[union-attr, index, operator]
    with pytest.raises(GraphError, match="not finite"):
        onnx_runner(decoder, tmp_path, num_slots=1)


def test_graphs_of_another_decoder_than_the_card_are_refused(tmp_path: Path) -> None:
    exported_card(toy_decoder(), tmp_path / "one")
    card = exported_card(toy_decoder(dataclasses.replace(CONFIG, num_layers=4)), tmp_path / "two")

    with pytest.raises(GraphError, match="other inputs than a decoder of its card: cache_k_03"):
        OnnxProgram(card, tmp_path / "one", threads=1, num_slots=1)


# Cards

CARD = dataclasses.replace(
    exported.CARD,
    decoder=toys.CONFIG.to_dict(),
    fingerprint={"clip": "0 1"},
    files={"decoder.onnx": "0"},
    gears=({"rows": 1},),
    picture_format=exported.PICTURES,
    vision={"clip": {"image_size": 8}},
)


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    for card in (CARD, dataclasses.replace(CARD, picture_format=None, vision=None)):
        card.write(tmp_path)
        assert read_card(tmp_path) == card


@pytest.mark.parametrize(
    "content",
    [
        {"files": {"decoder.onnx": 1}},
        {"files": {"decoder.onnx": None}},
        {"fingerprint": {"clip": [1]}},
        {"gears": (1,)},
        {"gears": ({"rows": "x"},)},
        {"gears": (None,)},
        {"dtype": "int4"},
        {"decoder": {}},
        {"decoder": {**CARD.decoder, "dim": "x"}},
        {"settings": 7},
        {"template": "other"},
        {"picture_format": {"token": "<image>"}},
        {"vision": [1]},
        {"picture_format": {**dataclasses.asdict(exported.PICTURES), "token_id": "7"}},
        *(b"", b"[" * 100_000, b"\xff\0", b"null", b'{"version": ' + b"9" * 5000 + b"}"),
    ],
    ids=lambda content: repr(content)[:40],
)
def test_a_card_with_a_value_of_another_kind_is_refused(content: dict[str, Any] | bytes, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / CARD_FILE).write_bytes(content)
    else:
        dataclasses.replace(CARD, **content).write(tmp_path)
    with pytest.raises(GraphError, match=r"decoder\.json` cannot be read"):
        read_card(tmp_path)
