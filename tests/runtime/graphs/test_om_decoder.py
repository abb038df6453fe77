"""A decoder's step graph as one OM with gears: prefill and increment with stand-ins for ATC and ais_bench."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.llm.exported.export import DECODER_FILE, PREFIX_FILE
from llama_adapter.llm.exported.om_steps import OmPrefix, OmStep, open_om_program
from llama_adapter.llm.exported.program import stacked
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.llm.exported.step import layer_ports, stacked_ports
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.atc import AtcSettings, make_om, plan_dims
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.gears import Gear, check_gears
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.om_dims import OmDimsSession
from llama_adapter.runtime.graphs.onnx_session import open_inference_session
from llama_adapter.runtime.graphs.toolkit import find_atc
from tests.llm.exported import exported_card
from tests.llm.test_exported_decoder import check_answers_and_scores
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    FAMILIES,
    rounding,
    toy_decoder,
    toy_engine,
    toy_past,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)

PLAIN = dataclasses.replace(CONFIG, num_adapter_layers=0, num_queries=0)
ROWS, TOKENS, CACHED = 2, 8, 8
PREFILL = {"R": ROWS, "S": TOKENS, "P_plus_S": CACHED + TOKENS, "T": ROWS, "P": CACHED}
INCREMENT = {"R": ROWS, "S": 1, "P_plus_S": CACHED + 1, "T": ROWS, "P": CACHED}

pytestmark = pytest.mark.usefixtures("acl", "atc")


def compiled(file: Path, gears: Sequence[Gear]) -> Path:
    """The OM of a graph, beside it."""
    settings = AtcSettings(soc_version="Ascend310P3", precision_mode="origin")
    return make_om(plan_dims(read_graph(file), file.with_suffix(""), settings, gears), atc=find_atc())


@pytest.mark.parametrize(
    ("config", "sampling", "embeddings"),
    [(CONFIG, True, False), (PLAIN, False, False), (PLAIN, True, True)],
    ids=["adapter", "no adapter", "pictures as tokens"],
)
def test_steps_of_any_size_are_padded_to_a_gear(
    config: DecoderConfig, sampling: bool, embeddings: bool, tmp_path: Path
) -> None:
    decoder, has = toy_decoder(config), {"sampling": sampling, "embeddings": embeddings}
    exported_card(decoder, tmp_path / "returned", storing="returned", **has)
    reference = open_inference_session(tmp_path / "returned" / DECODER_FILE, threads=1)
    exported_card(decoder, tmp_path / "stacked", storing="stacked", **has)
    file = tmp_path / "stacked" / DECODER_FILE
    assert {one.sentence for one in lint_graph(read_graph(file), has_dims=True) if one.level == "error"} == set()
    om = compiled(file, [PREFILL, INCREMENT, {**INCREMENT, "R": 4, "T": 4}, {**PREFILL, "T": 9}])
    draw = np.random.default_rng(0)

    with closing(OmStep(OmDimsSession(om), config)) as step:
        for rows, tokens, cached, wanted in ((2, 8, 0, [7, 15]), (1, 5, 0, [2, 3, 4]), (3, 1, 6, [0, 1, 2])):
            inputs: dict[str, np.ndarray] = {}
            for port in reference.get_inputs():
                sizes = {"R": rows, "S": tokens, "P": cached, "P_plus_S": cached + tokens, "T": len(wanted)}
                shape = [sizes.get(size, size) for size in port.shape]
                inputs[port.name] = draw.normal(size=shape).astype(np.float32)
            inputs["ids"] = draw.integers(0, config.vocab_size, (rows, tokens), dtype=np.int32)
            if embeddings:  # given in place of some ids, in the step of one token too
                inputs["ids"][::2, ::3] = -1
            inputs["positions"] = np.broadcast_to(np.arange(cached, cached + tokens, dtype=np.int32), (rows, tokens))
            inputs["mask"] = np.tri(tokens, cached + tokens, cached, dtype=bool)[None].repeat(rows, axis=0)
            inputs["wanted"] = np.array(wanted, np.int32)
            if sampling:
                inputs |= {name: np.abs(inputs[name]) for name in ("temperature", "top_p", "uniform")}
                inputs["uniform"] %= 1.0
                inputs["top_k"] = np.zeros(len(wanted), np.int32)
            given = [array for name, array in inputs.items() if cached or not name.startswith("cache")]
            expected = reference.run(None, inputs)
            for found, whole in zip(step.run(given), expected, strict=True):
                assert found.shape == whole.shape
                assert np.allclose(found, whole, atol=rounding(config), rtol=0)
        with pytest.raises(GraphError, match="No gear of"):
            step.run([np.zeros((1, 9), np.int32), *given[1:2], np.zeros((1, 9, 9), bool), *given[3:]])


def test_any_number_of_pictures_is_projected(tmp_path: Path) -> None:
    decoder = toy_decoder()
    exported_card(decoder, tmp_path)
    om = compiled(tmp_path / PREFIX_FILE, [{"B": 1}, {"B": 4}])
    queries = toy_visual_queries(7)

    with closing(OmPrefix(OmDimsSession(om))) as prefix:
        made = stacked(prefix.run([queries.numpy()]), CONFIG, num_pictures=7)

    wanted = decoder.project_prefix(queries)
    assert np.allclose(made.k, wanted.k.numpy(), atol=rounding(), rtol=0)  # smaller numbers than the logits
    assert np.allclose(made.v, wanted.v.numpy(), atol=rounding(), rtol=0)


def test_a_cache_input_per_layer_is_too_much_for_acl_at_7b() -> None:
    def ports(names: list[str], *, heads: int) -> list[Port]:
        shape = (-1, heads, -1, 128)
        return [Port(name=name, dtype="float16", shape=shape, symbols=("R", "P")) for name in names]

    gears = [{"R": 1, "P": 128}, {"R": 1, "P": 256}]
    with pytest.raises(ValueError, match="256 dimensions together, and ACL takes 128"):
        check_gears(ports(layer_ports("cache", 32), heads=32), gears)
    check_gears(ports(stacked_ports("cache"), heads=32 * 32), gears)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "num_past"), [(CONFIG, 0), (CONFIG, 4), *((config, 4) for config in FAMILIES.values())]
)
@pytest.mark.proves("prefix tuning", "OM")
@pytest.mark.proves("Llama 3, TinyLlama, SmolLM2", "OM")
@pytest.mark.proves("Mistral, Phi-3, SmolLM3", "OM")
@pytest.mark.proves("Qwen2, Qwen2.5, Qwen3", "OM")
@pytest.mark.proves("Gemma 2, Gemma 3", "OM")
@pytest.mark.proves("OLMo 2, OLMo 3, Granite", "OM")
def test_the_engine_gives_torchs_answers(config: DecoderConfig, num_past: int, tmp_path: Path) -> None:
    decoder = toy_decoder(config)
    card = dataclasses.replace(exported_card(decoder, tmp_path, storing="stacked"), format="onnx-atc")
    # The gears have fewer rows than slots for prompts, and fewer tokens and wanted tokens than all continuations of a
    # prompt.
    steps = [(1, 32, 4, 2), (2, 32, 4, 1), (4, 1, 35, 4), (1, 1, 20, 1)]
    gears = [dict(zip(("R", "S", "P", "T", "P_plus_S"), (*step, step[1] + step[2]), strict=True)) for step in steps]
    compiled(tmp_path / DECODER_FILE, gears)
    compiled(tmp_path / PREFIX_FILE, [{"B": 1}, {"B": 4}])
    past = toy_past(config, num_past)
    program, most_tokens = open_om_program(card, tmp_path, device_id=0, num_slots=4, past=past)
    shorter = dataclasses.replace(config, context=most_tokens)
    runner = ExportedRunner(program, EngineConfig(decoder=shorter, dtype=np.dtype("float32"), num_slots=4, past=past))
    engines = [toy_engine(decoder, num_slots=4, past=past), Engine(runner, eos_id=EOS_ID)]

    with closing(program):
        check_answers_and_scores(engines, toy_prompts(9, longest=20), config)
        [request] = toy_requests(engines[1], [(5,) * 33], sampling=[SamplingParams()], config=config)
        with pytest.raises(PromptTooLongError):
            engines[1].submit(request)

    assert most_tokens == 32 + num_past


def test_a_folder_without_its_om_says_how_to_make_it(tmp_path: Path) -> None:
    card = dataclasses.replace(exported_card(toy_decoder(), tmp_path, storing="stacked"), format="onnx-atc")

    with pytest.raises(GraphError, match=r"has no `decoder\.om`"):
        open_om_program(card, tmp_path, device_id=0, num_slots=1)
