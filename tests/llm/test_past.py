"""Past keys and values: runners answer as if the past's tokens preceded the prompt, and files are read exactly."""

import dataclasses
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.llm.weights.past import read_past, write_pre_caches
from llama_adapter.runtime.errors import CheckpointError
from tests.bounds import difference, unit
from tests.llm.exported import runner_of
from tests.llm.toys import (
    EOS_ID,
    FAMILIES,
    answer,
    drain,
    eager,
    rounding,
    to_score,
    toy_decoder,
    toy_past,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)
from tests.llm.toys import NATIVE as CONFIG

DECODER = toy_decoder(CONFIG)
TEXT = (1, 17, 250, 33, 8)  # the tokens of the past


RUNNERS = ("kernels", "exact", "bucketed", "stepped", "onnx", "onnx on a device")
SETTINGS = [SamplingParams(max_new_tokens=11), SamplingParams(max_new_tokens=9, temperature=0.8, seed=3)]


def text_past() -> PastKeyValues:
    """The keys and values of TEXT, without a picture."""
    runner = eager(DECODER, num_slots=1)
    runner.prefill([TEXT], [runner.empty_prefix()], first_slot=0)
    return runner.kept(num_tokens=len(TEXT))


@pytest.mark.parametrize(("kind", "num_slots"), [*((kind, 3) for kind in RUNNERS), ("kernels", 1), ("onnx", 1)])
def test_a_past_is_a_text_in_front_of_every_prompt(kind: str, num_slots: int, tmp_path: Path) -> None:
    prompts = toy_prompts(7, longest=20)
    settings = [SETTINGS[number % 2] for number in range(len(prompts))]
    runner = runner_of(kind, CONFIG, tmp_path, num_slots=num_slots, past=text_past())
    whole, engine = Engine(eager(DECODER, num_slots=1), eos_id=EOS_ID), Engine(runner, eos_id=EOS_ID)
    engine.warm_up(prompt_tokens=9, new_tokens=5)

    answered, scores = [], []
    for one, texts in ((whole, [(*TEXT, *prompt) for prompt in prompts]), (engine, prompts)):
        requests = [
            dataclasses.replace(request, prefix=one.empty_prefix())
            for request in toy_requests(one, texts, sampling=settings, config=CONFIG)
        ]
        answered.append(answer(one, requests))
        for request in requests[:3]:
            one.submit(to_score(request, ((5, 6, 7), (8,), (5, 9))))
        scores.append({output.request_id: output.logprobs for output in drain(one)})

    assert answered[1] == answered[0]
    assert any(len(ids) > 3 for ids, _ in answered[0].values())
    for number in range(3):
        assert scores[1][number] == pytest.approx(scores[0][number], abs=2 * 3 * rounding(CONFIG))
    for slot in range(num_slots):
        runner.clear(slot)
    assert answer(engine, requests) == answered[0], "a cleared slot keeps its past"


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_past_has_the_heads_positions_and_windows_of_every_family(config: DecoderConfig) -> None:
    decoder = toy_decoder(config)
    first, whole = (eager(decoder, num_slots=2) for _ in range(2))
    [prefix] = first.project_prefix(toy_visual_queries(1, config=config))
    first.prefill([TEXT], [prefix], first_slot=0)
    past = first.kept(num_tokens=len(TEXT))
    assert past.k_LNCH.shape[1] == config.num_kv_heads
    prompts = toy_prompts(2, longest=20)
    expected = whole.prefill([(*TEXT, *prompt) for prompt in prompts], [prefix] * 2, first_slot=0).logits_RV
    for shapes in (EXACT, BUCKETED):
        runner = eager(decoder, num_slots=2, past=past, shapes=shapes)
        assert difference(runner.prefill(prompts, [prefix] * 2, first_slot=0).logits_RV, expected) <= rounding(config)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_keys_are_shifted_as_each_layer_rotates(config: DecoderConfig, tmp_path: Path) -> None:
    runner, count = eager(toy_decoder(config), num_slots=1), len(TEXT)
    runner.prefill([TEXT * 2], [runner.empty_prefix()], first_slot=0)
    keys = runner.kept(num_tokens=2 * count).k_LNCH
    np.save(tmp_path / "past.npy", np.stack([keys[:, :, :count]] * 2, axis=1))
    read = read_past(tmp_path / "past.npy", config)  # at the positions after those of the file

    np.testing.assert_allclose(read.k_LNCH[0], keys[0, :, count:], atol=1e-4, rtol=0)  # no layer below mixes tokens
    for layer in range(config.num_layers):
        is_equal = np.array_equal(read.k_LNCH[layer], keys[layer, :, :count])
        assert is_equal == (config.rotary_of(layer) is None)


def test_the_context_holds_past_prompt_and_answer() -> None:
    engine = Engine(eager(DECODER, num_slots=1, past=text_past()), eos_id=-1)
    prompt = tuple([1] * (CONFIG.context - len(TEXT) - 4))

    [request] = toy_requests(engine, [prompt], sampling=[SamplingParams(max_new_tokens=50)], config=CONFIG)

    ids, finish = answer(engine, [request])[0]
    assert (len(ids), finish) == (4, "length")


@pytest.mark.parametrize("config", [CONFIG, *FAMILIES.values()], ids=["llama", *FAMILIES])
def test_pre_caches_of_paddlenlp_are_read_as_they_were_written(config: DecoderConfig, tmp_path: Path) -> None:
    past = toy_past(config, len(TEXT))
    assert past is not None
    with (tmp_path / "pre_caches.npy").open("wb") as file:
        write_pre_caches(file, past, config)

    for path in (tmp_path, tmp_path / "pre_caches.npy"):
        read = read_past(path, config)
        # Keys are rotated back when they are written, and rotated again: two products and their sum each time.
        limit = 2 * 4 * unit(torch.float32) * np.abs(past.k_LNCH).max()
        np.testing.assert_allclose(read.k_LNCH, past.k_LNCH, atol=limit, rtol=0)
        np.testing.assert_array_equal(read.v_LNCH, past.v_LNCH)
    stored = np.load(tmp_path / "pre_caches.npy")
    assert stored.shape == (config.num_layers, 2, config.num_kv_heads, len(TEXT), config.head_dim)


def npy(head: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def npz() -> bytes:
    np.savez(file := io.BytesIO(), a=np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 5000 + b"}\n"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}\n"),
        npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2, 2, 3000000000, 4)}\n"),
        npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}\n") + pickle.dumps([1, 2, 3]),
        npz(),
        npz()[:-30],
        b"PK\3\4" * 20,
        b"[" * 50_000,
    ],
    ids=["deep", "huge", "larger than the file", "objects", "zip", "zip cut short", "no zip", "deep JSON"],
)
def test_a_file_that_is_no_array_of_numbers_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.npy.* cannot be opened"):
        read_past(tmp_path / "x.npy", CONFIG)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("wrong", [torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 7)], ids=["dtype", "shape"])
def test_prompt_embeddings_of_another_kind_are_refused(name: str, wrong: torch.Tensor, tmp_path: Path) -> None:
    if wrong.dtype == torch.int64:
        wrong = torch.ones(3, 2 * CONFIG.num_layers * CONFIG.dim, dtype=torch.int64)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    tensors = {"prompt_embeddings": wrong}
    save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}` holds prompt embeddings of shape .* needs floats \(tokens, "):
        read_past(tmp_path, CONFIG)
