"""ATC's command lines, runs of the stand-in in tests/fakes, and the files that remain afterwards."""

import dataclasses
import shlex
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from syrupy.assertion import SnapshotAssertion

from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.explanation import first_that_fits, read_explanations
from llama_adapter.runtime.graphs.atc import AtcRequest, AtcSettings, command, explain_failure, make_om, plan
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.sidecar import read_sidecar, sidecar_path
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.terminal.run_guarded import format_problem
from tests.fakes.om_format import read_fake_om
from tests.runtime.graphs.test_lint import write
from tests.runtime.graphs.test_process_session import ends

CARD = GraphCard(
    name="tiny",
    config={"clip": {"image_size": 4}, "query": {"num_queries": 2}, "channel_order": "rgb"},
    dtype="float16",
    opset=18,
    fingerprint={"clip": "00", "query": "11"},
)


def write_onnx(
    path: Path, *, dtype: int = TensorProto.FLOAT16, card: bool = True, shape: tuple[Any, ...] = ("batch", 4, 4, 3)
) -> Path:
    write(path, "Relu", dtype=dtype, shape=shape)
    if card:
        model = onnx.load(path)
        told = dataclasses.replace(CARD, dtype="float16" if dtype == TensorProto.FLOAT16 else "float32")
        helper.set_model_props(model, {METADATA_KEY: told.to_json()})
        onnx.save(model, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_onnx(tmp_path / "clip.onnx")


def planned(file: Path, out: Path, **settings: Any) -> list[AtcRequest]:
    settings = {"batch_sizes": (4, 1), "gears": False, "soc_version": "Ascend310P3", **settings}
    return plan(read_graph(file), out, AtcSettings(**settings))


def script(folder: Path, text: str) -> Path:
    """An ATC that executes the shell script `text`."""
    path = folder / "atc"
    path.write_text(f"#!/bin/sh\nfor flag; do case $flag in --output=*) out=${{flag#*=}};; esac; done\n{text}\n")
    path.chmod(0o755)
    return path


COMMANDS: dict[str, dict[str, Any]] = {
    "each batch size has its own OM": {},
    "gears share one OM": {
        "gears": True,
        "precision_mode": "force_fp16",
        "log_level": "info",
        "extra": ("--x=1", "--y=2"),
    },
    "activations are compiled for speed on a 310P only": {"soc_version": "Ascend910B4-1"},
    "precision": {"op_select_implmode": "high_precision"},
    "own flags": {"extra": ("--op_precision_mode=my.ini",)},
    "precision of some": {"op_select_implmode": "high_precision", "optypelist_for_implmode": "Gelu", "device": 1},
}


def test_the_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_onnx(Path("clip.onnx"))
    told = []
    for name, how in COMMANDS.items():
        told += [f"{name}:", *(shlex.join(command(one)) for one in planned(file, Path("out/v1.2.om"), **how))]
    assert "\n".join(told) == snapshot
    assert planned(file, Path("out/v1.2.om"), gears=True)[0].output == Path("out/v1.2.om")
    assert planned(file, Path("out/encoder"))[1].output == Path("out/encoder_bs4.om")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (0, 1)}, "batch_sizes"),
        ({"batch_sizes": (1, 4096)}, "batch_sizes"),
        ({"batch_sizes": (4, 4), "gears": True}, "gears"),
        ({"batch_sizes": range(1, 102), "gears": True}, "gears"),
        ({"precision_mode": "best"}, "precision_mode"),
        ({"log_level": "loud"}, "log_level"),
        ({"op_select_implmode": "fast"}, "op_select_implmode"),
        ({"optypelist_for_implmode": "Gelu"}, "optypelist_for_implmode"),
        ({"device": -1}, "device"),
        ({"soc_version": ""}, "soc_version"),
        ({"soc_version": "310P3"}, "soc_version"),
    ],
)
def test_impossible_settings_are_refused(file: Path, settings: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        planned(file, Path("clip"), **settings)


@pytest.mark.parametrize("gears", [False, True])
def test_an_om_is_put_in_place_with_its_sidecar(
    file: Path, atc: Path, tmp_path: Path, gears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = planned(Path("clip.onnx"), Path("made") / "encoder", gears=gears)[0]
    (tmp_path / "made").mkdir()
    sidecar_path(request.output).write_text("of an older OM")

    made = make_om(request, atc=atc)

    assert made == tmp_path / request.output
    header, content = read_fake_om(made)
    sidecar = read_sidecar(made)
    assert sorted(path.name for path in made.parent.iterdir()) == [made.name, made.name + ".json"]
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert header["batch_sizes"] == ([1, 4] if gears else [1])
    assert content == file.read_bytes()
    assert sidecar is not None
    assert sidecar.card == CARD
    assert (sidecar.batch_sizes, sidecar.has_gears) == (((1, 4), True) if gears else ((1,), False))
    assert (sidecar.sha256, sidecar.onnx_sha256) == (file_digest(made), file_digest(file))
    assert sidecar.input.dtype == "float16"
    assert sidecar.input.shape == tuple(header["input"]["shape"]) == (-1 if gears else 1, 4, 4, 3)
    assert (sidecar.soc_version, sidecar.precision_mode) == ("Ascend310P3", "mixed_float16")


def test_a_model_scheduled_by_the_host_has_another_name(file: Path, tmp_path: Path) -> None:
    atc = script(tmp_path, 'echo om > "${out}_linux_aarch64.om"')

    made = make_om(planned(file, tmp_path / "made" / "clip")[0], atc=atc)

    assert made.name == "clip_bs1.om"
    assert made.read_text() == "om\n"


def test_a_graph_of_another_program_has_no_card_and_extra_flags_may_change_its_input(atc: Path, tmp_path: Path) -> None:
    file = write_onnx(tmp_path / "clip.onnx", dtype=TensorProto.FLOAT, card=False)
    request = planned(file, tmp_path / "clip", extra=("--input_fp16_nodes=input",))[0]
    assert "--output_type=FP32" in command(request)

    header, _ = read_fake_om(make_om(request, atc=atc))

    sidecar = read_sidecar(request.output)
    assert sidecar is not None
    assert sidecar.card is None
    assert sidecar.input.dtype == header["input"]["dtype"] == "float16"


def test_the_digest_of_the_onnx_covers_external_weights(atc: Path, tmp_path: Path) -> None:
    model = onnx.load(write_onnx(tmp_path / "clip.onnx"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1000, dtype=np.float16), "unused"))
    file = tmp_path / "external.onnx"
    onnx.save(model, file, save_as_external_data=True, location="external.onnx.data", size_threshold=0)
    request = planned(file, tmp_path / "clip")[0]

    def digest() -> str:
        make_om(request, atc=atc)
        sidecar = read_sidecar(request.output)
        assert sidecar is not None
        return sidecar.onnx_sha256

    weights = tmp_path / "external.onnx.data"
    first = digest()
    assert first == file_digest(file, weights)
    weights.write_bytes(weights.read_bytes()[::-1])
    assert digest() != first


def test_a_failure_keeps_the_older_files(file: Path, atc: Path, tmp_path: Path) -> None:
    request = planned(file, tmp_path / "made" / "clip")[0]
    make_om(request, atc=atc)
    before = {path.name: path.read_bytes() for path in request.output.parent.iterdir()}
    failing = script(tmp_path, 'echo half > "$out.om"; echo "E19999: Inner Error!"; exit 1')

    with pytest.raises(GraphError, match="E19999"):
        make_om(request, atc=failing)

    assert {path.name: path.read_bytes() for path in request.output.parent.iterdir()} == before


def test_success_without_a_file_is_a_failure(file: Path, tmp_path: Path) -> None:
    atc = script(tmp_path, "echo ATC run success; touch fusion_result.json")

    with pytest.raises(GraphError, match=r"fusion_result\.json"):
        make_om(planned(file, tmp_path / "clip")[0], atc=atc)


def test_names_and_programs_that_do_not_work_are_refused(file: Path, tmp_path: Path) -> None:
    for name, words in (("clip", "cannot be run"), ("my clip", "characters that InferSession refuses")):
        with pytest.raises(GraphError, match=words):
            make_om(planned(file, tmp_path / name)[0], atc=tmp_path / "none")


@pytest.mark.parametrize("shape", [("batch", "height", "width", 3), ("batch", 4, 4, 0)])
def test_only_the_batch_may_be_free(tmp_path: Path, shape: tuple[Any, ...]) -> None:
    file = write_onnx(tmp_path / "clip.onnx", shape=shape, card=False)

    with pytest.raises(GraphError, match="free in more than its batch"):
        planned(file, tmp_path / "clip")


def test_the_time_is_reported_while_atc_runs_and_its_words_are_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.runtime.graphs.atc._TICK_S", 0.05)
    told: list[float] = []
    atc = script(tmp_path, "echo early; sleep 0.5; echo E19999: late; exit 1")

    with pytest.raises(GraphError, match=r"(?s)early.*late"):
        make_om(planned(file, tmp_path / "clip")[0], atc=atc, tick=told.append)

    assert len(told) >= 2
    assert told == sorted(told)


def test_an_interrupt_ends_atc_and_the_compiler_that_it_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.runtime.graphs.atc._TICK_S", 0.05)
    atc = script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait")

    def interrupt(_: float) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_om(planned(file, tmp_path / "clip")[0], atc=atc, tick=interrupt)

    assert ends(int((tmp_path / "pid").read_text()))


# Every known failure of ATC has an explanation

OUTPUTS = [
    "E16002: No parser is registered for Op [gelu_1, optype [ai.onnx::20::Gelu]].",
    "E10501: IR for Op [x, optype [Foo]] is not registered.",
    "E10001: Value [mixed] for parameter [--precision_mode_v2] is invalid.",
    "E10001: Value [Ascend99] for parameter [soc_version] is invalid.",
    "E19999: Inner Error!\n  TraceBack (most recent call last)",
    "Traceback ...\nModuleNotFoundError: No module named 'decorator'\nE19999: Inner Error!",
    "E10018: shape is invalid, maybe you should set input_shape to specify its shape",
    "atc: error while loading shared libraries: libge.so: cannot open shared object file",
    "[ERROR] ASCEND_OPP_PATH is empty",
    "terminate called after throwing 'std::bad_alloc'",
    "write: No space left on device",
]


def test_each_failure_has_its_explanation(snapshot: SnapshotAssertion) -> None:
    explained = [format_problem(describe(explain_failure(output, returncode=255))) for output in OUTPUTS]

    assert "\n\n".join(explained) == snapshot
    table = read_explanations("atc")
    found = {entry[0] for output in OUTPUTS if (entry := first_that_fits(table, output))}
    assert found == set(table)


@pytest.mark.parametrize("returncode", [-9, 137])
def test_a_killed_atc_ran_out_of_memory(returncode: int) -> None:
    killed = explain_failure("ATC start working now", returncode=returncode)

    assert killed.message == explain_failure("out of memory", returncode=1).message


def test_an_unknown_failure_shows_the_last_lines() -> None:
    error = explain_failure("\n".join(f"line {number}" for number in range(40)), returncode=3)

    assert error.message == "ATC failed with exit code 3. Its last lines:"
    assert error.details == tuple(f"line {number}" for number in range(25, 40))
    assert explain_failure("\n\n", returncode=3).message == "ATC failed with exit code 3, without any output"
