"""OMs with several inputs and gears over several dimensions: ATC's command line, runs, limits, and misuse."""

import dataclasses
import json
import runpy
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from llama_adapter.app.command_line.main import main
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
from llama_adapter.runtime.graphs import atc as atc_module
from llama_adapter.runtime.graphs.atc import AtcSettings, DimsRequest, command, make_om, plan_dims
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.dims_sidecar import DimsSidecar, read_dims_sidecar
from llama_adapter.runtime.graphs.gears import Gear, check_gears, parse_gear, with_sums
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.om_dims import OmDimsSession
from llama_adapter.runtime.graphs.onnx_session import open_inference_session
from llama_adapter.runtime.graphs.sidecar import sidecar_path
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
from tests.runtime.graphs.conftest import use_atc

HEADS, HEAD = 2, 4


def gear(rows: int, tokens: int, cached: int) -> Gear:
    return {"R": rows, "S": tokens, "P_plus_S": cached + tokens, "P": cached}


pytestmark = pytest.mark.usefixtures("acl", "atc")

GEARS = (gear(1, 8, 8), gear(1, 1, 8), gear(1, 1, 16), gear(4, 1, 16))
SETTINGS = AtcSettings(soc_version="Ascend310P3", precision_mode="origin")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_step(tmp_path)


# A float16 is given by its bits: 15360 is 1.
STEP = f"""
<ir_version: 8, opset_import: ["" : 17]>
step (int32[R, S] ids, bool[R, S, P_plus_S] mask, float16[R, {HEADS}, P, {HEAD}] cache)
    => (float[R, S] logits, float16[R, {HEADS}, P, {HEAD}] kept)
    <float16[1] one = {{15360}}>
{{
    ids_float = Cast <to = 1> (ids)
    mask_float = Cast <to = 1> (mask)
    mask_mean = ReduceMean <axes = [2], keepdims = 0> (mask_float)
    cache_float = Cast <to = 1> (cache)
    all_mean = ReduceMean <axes = [2, 3], keepdims = 0> (cache_float)
    cache_mean = ReduceMean <axes = [1], keepdims = 1> (all_mean)
    masked = Add (ids_float, mask_mean)
    logits = Add (masked, cache_mean)
    kept = Add (cache, one)
}}
"""


def write_step(folder: Path) -> Path:
    """A graph that computes: ids + mean of the mask + mean of the cache -> logits; cache + 1 -> kept."""
    onnx.save(onnx.parser.parse_model(STEP), folder / "step.onnx")
    return folder / "step.onnx"


def request_for(file: Path, gears: tuple[Gear, ...] = GEARS) -> DimsRequest:
    return plan_dims(read_graph(file), file.with_name("step"), SETTINGS, gears)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the OM that `om` copies."""
    file = write_step(tmp_path_factory.mktemp("made"))
    with pytest.MonkeyPatch.context() as patch:
        return make_om(request_for(file), atc=use_atc(patch)).parent


@pytest.fixture
def om(compiled: Path, tmp_path: Path) -> Path:
    shutil.copytree(compiled, tmp_path / "copied")
    return tmp_path / "copied" / "step.om"


@pytest.fixture
def session(acl: Any, om: Path) -> Iterator[OmDimsSession]:
    with closing(OmDimsSession(om)) as opened:
        yield opened


def arrays(chosen: Gear, *, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    rows, tokens, total, cached = (chosen[name] for name in ("R", "S", "P_plus_S", "P"))
    return [
        random.integers(0, 100, (rows, tokens), dtype=np.int32),
        random.random((rows, tokens, total)) < 0.5,
        random.random((rows, HEADS, cached, HEAD)).astype(np.float16),
    ]


def computed(inputs: list[np.ndarray]) -> list[np.ndarray]:
    ids, mask, cache = inputs
    return [ids + mask.mean(axis=2) + cache.astype(float).mean(axis=(1, 2, 3))[:, None], cache + np.float16(1)]


def test_the_command_line_has_a_number_for_each_open_size_of_each_gear(file: Path) -> None:
    assert command(request_for(file)) == [
        "--framework=5",
        f"--model={file}",
        f"--output={file.with_name('step')}",
        "--input_format=ND",
        "--input_shape=ids:-1,-1;mask:-1,-1,-1;cache:-1,2,-1,4",
        "--dynamic_dims=1,8,1,8,16,1,8;1,1,1,1,9,1,8;1,1,1,1,17,1,16;4,1,4,1,17,4,16",
        "--soc_version=Ascend310P3",
        "--precision_mode_v2=origin",
        "--log=error",
    ]


def test_every_gear_of_one_file_computes_what_the_graph_does(acl: Any, session: OmDimsSession) -> None:
    for number, chosen in enumerate(GEARS):
        inputs = arrays(chosen, seed=number)
        for output, wanted in zip(session.run(inputs), computed(inputs), strict=True):
            assert np.allclose(output, wanted, rtol=1e-3)

    assert session.device_ms is not None
    assert acl.RECORD.loaded == 1
    assert {thread for thread, *_ in acl.RECORD.calls}.isdisjoint({threading.get_ident()})
    session.close()
    assert acl.RECORD.freed == 1
    with pytest.raises(GraphError, match="closed"):
        session.run(arrays(GEARS[0]))


def test_the_gear_that_moves_the_fewest_bytes_is_picked(session: OmDimsSession) -> None:
    assert session.pick({"R": 1, "S": 1, "P": 3}) == GEARS[1]
    assert session.pick({"R": 1, "S": 5}) == GEARS[0]
    assert session.pick({"R": 2, "S": 1, "P": 1}) == GEARS[3]
    with pytest.raises(GraphError, match=r"No gear of .* has R=2 S=2") as caught:
        session.pick({"R": 2, "S": 2})
    assert "R=4 S=1 P_plus_S=17 P=16" in caught.value.message


def test_shapes_of_no_gear_are_refused_though_their_bytes_fit(session: OmDimsSession) -> None:
    ids, mask, cache = arrays(GEARS[3])
    for wrong in ([ids.T, mask, cache], [ids, mask, cache.swapaxes(1, 3)], [ids, mask], arrays(gear(2, 1, 8))):
        with pytest.raises(GraphError, match="in the shapes of no gear"):
            session.run(wrong)


def test_a_failure_on_the_device_names_the_gear(session: OmDimsSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", "execute")
    with pytest.raises(GraphError, match=r"takes the gear R=1 S=1 P_plus_S=9 P=8 and was given int32 \(1, 1\)"):
        session.run(arrays(GEARS[1]))


def test_a_side_car_must_be_that_of_the_file(acl: Any, om: Path) -> None:
    path = sidecar_path(om)
    text = path.read_text()
    assert DimsSidecar.from_json(text, file="f").to_json() == text
    stored = json.loads(text)
    path.unlink()
    with pytest.raises(GraphError, match="needs its side-car"):
        OmDimsSession(om)
    faults = {
        "digests differ": {"sha256": "0"},
        "takes ids int32": {"inputs": [{**stored["inputs"][0], "dtype": "float32"}, *stored["inputs"][1:]]},
        "gives logits float32": {"outputs": stored["outputs"][::-1]},
        "gives a size": {"gears": [{**one, "R": 0} for one in stored["gears"]]},
        "its version is 2": {"version": 2},
        "must be a list": {"gears": 1},
        "must be a whole number": {"gears": [{"R": "1"}] * 2},
        "must be a text": {"sources": {"decoder.onnx": 1}},
        "must be whole numbers and names": {"inputs": [{**stored["inputs"][0], "shape": [1.5]}]},
    }
    for words, change in faults.items():
        path.write_text(json.dumps(stored | change))
        with pytest.raises(GraphError, match=words):
            OmDimsSession(om)


@pytest.mark.parametrize(
    ("inputs", "gears", "words"),
    [
        ([(1, -1)], [{"A": 1}], "2 to 100 gears"),
        ([(1, -1)], [{"A": size} for size in range(1, 102)], "2 to 100 gears"),
        ([(1, -1)], [{"A": 1}, {"A": 1}], "twice"),
        ([(1, -1)], [{"A": 1}, {"A": 0}], "at least 1"),
        ([(1, -1)], [{"A": 1}, {"B": 1}], "gives a size"),
        ([(1, 1, 1, 1, -1)], [{"A": 1}, {"A": 2}], "5 dimensions"),
        ([(1, 1, 1, -1)] * 33, [{"A": 1}, {"A": 2}], "132 dimensions together"),
        ([(1, -1)], [{"A": 1}, {"A": 10**4096}], "4107 characters"),
    ],
)
def test_gears_that_atc_or_acl_refuse_are_refused(inputs: list[Any], gears: list[Gear], words: str) -> None:
    ports = [
        Port(name=f"input_{number}", dtype="float32", shape=shape, symbols=("A",))
        for number, shape in enumerate(inputs)
    ]
    with pytest.raises(ValueError, match=words):
        check_gears(ports, gears)


def test_names_that_separate_and_sizes_without_a_name_are_refused(file: Path) -> None:
    for name, symbols in (("a:b", ("A",)), ("a", ())):
        with pytest.raises(ValueError, match="name"):
            check_gears([Port(name=name, dtype="float32", shape=(-1,), symbols=symbols)], [{"A": 1}, {"A": 2}])
    with pytest.raises(GraphError, match="cannot be compiled with these gears"):
        request_for(file, gears=GEARS[:1])


def test_weights_beyond_the_limit_of_an_om_stay_outside_of_it(
    acl: Any, file: Path, atc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atc_module, "MAX_OM_BYTES", 100)
    request = request_for(file)
    assert "--external_weight=1" in command(request)
    om = make_om(request, atc=atc)
    (weights,) = (om.parent / "weight").iterdir()

    sidecar = read_dims_sidecar(str(om))

    assert sidecar.weights == {weights.name: weights.stat().st_size}
    with closing(OmDimsSession(om)) as session:
        assert len(session.run(arrays(GEARS[0]))) == 2
    weights.unlink()
    with pytest.raises(GraphError, match="is missing or has another size"):
        OmDimsSession(om)


def test_the_lint_knows_inputs_of_a_step(file: Path) -> None:
    assert [(one.level, one.subject) for one in lint_graph(read_graph(file), has_dims=True)] == [
        ("warning", "input mask")
    ]
    assert {one.level for one in lint_graph(read_graph(file))} == {"error"}


def test_gears_are_read_from_texts_and_completed_by_sums(file: Path) -> None:
    inputs = read_graph(file).inputs
    assert with_sums(parse_gear("R=1, S=8,P=8"), inputs) == GEARS[0]
    assert with_sums({"R": 1}, inputs) == {"R": 1}
    for text in ("", "R", "R=", "R=-1", "R=1;S=2", "=1"):
        with pytest.raises(ValueError, match="wanted sizes by name"):
            parse_gear(text)


def test_the_command_makes_an_om_of_several_sizes(
    acl: Any, file: Path, atc: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["export", "om", str(file), "--soc-version", "Ascend310P3", "--precision-mode", "origin"]
    flags += ["--sizes", "R=1,S=8,P=8", "--sizes", "R=1,S=1,P=8"]

    assert main([*flags, "--print-command"]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert main(flags) == 0

    assert printed == ["atc", *command(request_for(file, gears=GEARS[:2]))]
    with closing(OmDimsSession(file.with_suffix(".om"))) as session:
        assert session.gears == GEARS[:2]
    assert main([*flags, "--gears"]) == 2


# A decoder's step graph as one OM with gears: prefill and increment

PLAIN = dataclasses.replace(CONFIG, num_adapter_layers=0, num_queries=0)
PREFILL, INCREMENT = gear(2, 8, 8) | {"T": 2}, gear(2, 1, 8) | {"T": 2}


def om_of(file: Path, gears: Sequence[Gear]) -> Path:
    """The OM of a graph, beside it. The stand-in for ATC runs in this process, as its start takes most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # it adds its own folder
        stand_in = runpy.run_path(str(find_atc()))
        patch.setattr(atc_module, "_run", lambda _, flags, **__: stand_in["convert"](stand_in["read_flags"](flags)))
        return make_om(plan_dims(read_graph(file), file.with_suffix(""), SETTINGS, gears), atc=find_atc())


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
    om = om_of(file, [PREFILL, INCREMENT, {**INCREMENT, "R": 4, "T": 4}, {**PREFILL, "T": 9}])
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
    om = om_of(tmp_path / PREFIX_FILE, [{"B": 1}, {"B": 4}])
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
@pytest.mark.parametrize(("config", "num_past"), [(CONFIG, 0), *((config, 4) for config in FAMILIES.values())])
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
    gears = [gear(rows, tokens, cached) | {"T": wanted} for rows, tokens, cached, wanted in steps]
    om_of(tmp_path / DECODER_FILE, gears)
    om_of(tmp_path / PREFIX_FILE, [{"B": 1}, {"B": 4}])
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
    om_of(tmp_path / DECODER_FILE, [gear(1, 32, 1) | {"T": 1}, gear(1, 1, 35) | {"T": 1}])  # no past before a prompt
    program, most_tokens = open_om_program(card, tmp_path, device_id=0, num_slots=4, past=past)
    program.close()
    assert most_tokens == (5 if num_past else 32)


def test_a_folder_without_its_om_says_how_to_make_it(tmp_path: Path) -> None:
    card = dataclasses.replace(exported_card(toy_decoder(), tmp_path, storing="stacked"), format="onnx-atc")

    with pytest.raises(GraphError, match=r"has no `decoder\.om`"):
        open_om_program(card, tmp_path, device_id=0, num_slots=1)
