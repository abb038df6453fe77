"""The doctor's table: every part of the environment with its state, and hints for gaps and failures."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.doctor.command import (
    MIN_WIDTH,
    NAME_WIDTH,
    PIPE_WIDTH,
    environment_table,
    finding_lines,
    run_checkup,
    summary,
    terminal_width,
)
from llama_adapter.app.command_line.doctor.environment import (
    ADVICE,
    ASCEND,
    NEEDED,
    WITH_TORCH,
    Probe,
    _accelerators,
    fold,
    is_needed,
    look_at_environment,
    uses_of,
)
from llama_adapter.app.command_line.doctor.findings import Finding
from llama_adapter.app.command_line.doctor.probes import (
    list_devices,
    look_at_aclruntime,
    look_at_ais_bench,
    look_at_atc,
    look_at_cann,
    look_at_kernels,
    look_at_package,
    look_at_torch,
    look_at_torch_npu,
)
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.child_process import absent, ask_child, broken, ok
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.kernels import library
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.torch_import import AUTOLOAD, explain_torch_import, prepare_imports
from tests.app.command import Ran, run_several
from tests.app.golden import ROOT
from tests.npu import wheel

WITHOUT_CANN = ROOT / "tests" / "fakes" / "torch_npu_without_cann"
ALWAYS = uses_of()


def in_a_line(said: dict[str, Any]) -> str:
    return "{state}: {found} [{hint}]".format(**said)


def in_words(text: str) -> str:
    """Undo the table's line breaks."""
    return " ".join(text.split())


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


# Levels and printing.


def test_what_an_om_and_an_exported_decoder_need_and_that_all_parts_have_advice() -> None:
    uses = uses_of(vision="om")

    assert all(is_needed(name, uses=uses) for name in ("CANN", "NPU devices", "aclruntime", "ais_bench", "torch"))
    assert not any(is_needed(name, uses=uses) for name in ("torch_npu", "onnxruntime", "atc"))
    assert uses_of(device="npu:0", vision="onnx", has_decoder=True) == {"always"} == ALWAYS - {WITH_TORCH}
    assert is_needed("torch", uses=uses_of(vision="torch", has_decoder=True))
    parts = {name for names in NEEDED.values() for name in names} - {"python"}
    assert parts == ADVICE.keys() - {"CPU kernels"}


def test_the_table(snapshot: SnapshotAssertion) -> None:
    path = "/a-folder/" * 14 + "set_env.sh"  # commands and paths are never wrapped
    probes = [
        Probe(name="torch", state="ok", found="2.13.0+cpu"),
        Probe(name="numpy", state="absent"),
        Probe(name="CANN", state="broken", found="no folder has it " * 6, hint=f"{'word ' * 20}source {path}"),
        Probe(name="NPU devices", state="absent"),
        Probe(name="atc", state="absent", hint="short"),
        Probe(name="onnx", state="absent"),
    ]
    lines = environment_table(probes, uses=uses_of(), width=PIPE_WIDTH)
    on_npu = environment_table(probes[2:4], uses=uses_of(device="npu:0", vision="om"), width=PIPE_WIDTH)

    assert all(len(line) <= PIPE_WIDTH == 80 or path in line for line in lines)
    assert "\n".join(lines) == snapshot
    levels = {line[:NAME_WIDTH].strip(): line[NAME_WIDTH:].split()[0] for line in on_npu if line[0] != " "}
    assert levels == {"part": "state", "CANN": "error", "NPU devices": "error"}


def test_the_findings_about_a_model(snapshot: SnapshotAssertion) -> None:
    hostile = "a\x1b[2J\x9b\u202eb\rc\nd"
    findings = [
        Finding(level="ok", what="llama", sentence="All is well"),
        Finding(level="error", what="adapter", sentence="word " * 30, hint="word " * 30),
        Finding(level="not tried", what=hostile, sentence=hostile, hint=hostile),
    ]
    lines = finding_lines(findings, width=PIPE_WIDTH)

    assert all(line.isprintable() and len(line) <= PIPE_WIDTH for line in lines)
    assert "\n".join(lines) == snapshot


@pytest.mark.parametrize(("columns", "width"), [("1", MIN_WIDTH), ("77", 77), ("100000", 120)])
def test_the_table_is_as_wide_as_the_terminal_within_limits(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


def test_absent_parts_of_ascend_are_one_line() -> None:
    torch = Probe(name="torch", state="ok", found="2.13.0")
    absent = [Probe(name=name, state="absent") for name in ASCEND if name != "NPU operators"]
    there = [Probe(name="CANN", state="broken", found="x"), Probe(name="atc", state="ok", found="y")]
    others = [probe for probe in absent if probe.name not in ("CANN", "atc")]
    nothing, some = "nothing installed", "no NPU devices, no torch_npu, no aclruntime, no ais_bench installed"

    for probes, kept, found in (([torch, *absent], [torch], nothing), ([*others, *there], there, some)):
        line = Probe(name="Ascend", state="absent", found=f"{found} (docs/ascend.md)")
        assert fold(probes, uses=uses_of(device="cuda:0", vision="onnx")) == [*kept, line]
    for flags in ({"device": "npu:0"}, {"vision": "om"}):
        assert fold(absent, uses=uses_of(**flags)) == absent
    assert fold(there, uses=ALWAYS) == there


def test_the_last_line_names_each_failure_once_in_order() -> None:
    checks = [("CANN", "error"), ("torch", "ok"), ("atc", "warning"), ("llama", "error"), ("llama", "error")]

    assert summary(checks) == ("3 errors, 1 warning in 5 checks, to fix in this order: CANN, llama", 3)
    assert summary(checks[:2]) == ("1 error in 2 checks: CANN", 1)
    assert summary(checks[1:2]) == ("no errors in 1 check", 0)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "GOMP_SPINCOUNT", "10000"),
        ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT", None),
        ({"GOMP_SPINCOUNT": "5"}, "GOMP_SPINCOUNT", "5"),
        ({}, AUTOLOAD, "0"),
        ({AUTOLOAD: "1"}, AUTOLOAD, "1"),
    ],
)
def test_threads_spin_briefly_and_extensions_are_deferred_unless_the_user_decides_otherwise(
    given: dict[str, str], name: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mock.patch.dict(os.environ, given):
        for other in {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", AUTOLOAD} - given.keys():
            monkeypatch.delenv(other, raising=False)
        prepare_imports()
        assert os.environ.get(name) == value


def test_what_fails_together_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = broken("its check was ended by signal 11")

    def answer(question: str, *names: str, **limits: Any) -> dict[str, Any]:
        name = question.partition(":look_at_")[2]
        if name == "packages":
            return ended if "onnx" in names else ok("", packages={"numpy": ok("1")})
        if name == "package":
            return broken("no") if names == ("uvicorn",) else {**absent(), "found": " ".join(names)}
        return ended if name == "kernels" else ok("2.0") if name == "torch" else absent()

    monkeypatch.setattr("llama_adapter.app.command_line.doctor.environment.ask_child", answer)
    found = {probe.name: (probe.state, probe.found) for probe in look_at_environment()}

    assert found["numpy"] == ("ok", "1")
    assert found["uvicorn"] == ("broken", "no")
    assert found["onnx"] == ("absent", "onnx")
    assert found["torch"] == ("ok", "2.0")
    state, copy = found["llama-adapter"]
    assert state == "ok"
    assert copy.endswith(f", run from {ROOT}")
    assert found["CPU kernels"] == ("broken", "its check was ended by signal 11")


def test_kernels_that_no_command_can_choose_are_broken_and_their_row_says_why_others_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused() -> None:
        raise UsageError("no such instruction set", hint="name another")

    finding = library.Finding(library=mock.Mock(), variant="avx2", origin="compiled")
    monkeypatch.setattr(library, "find_library", lambda: finding)
    assert look_at_kernels()["hint"] == ""
    monkeypatch.setattr("llama_adapter.runtime.user_cache._fault", "no home folder")
    assert look_at_kernels()["hint"] == "compiled kernels are kept for this run only: no home folder"
    monkeypatch.setattr(library, "find_library", refused)
    assert look_at_kernels() == broken("no such instruction set", hint="name another")


def test_a_file_in_place_of_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "uvicorn.py"
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    question = f"{look_at_package.__module__}:look_at_package"

    said = ask_child(question, "uvicorn", environ=os.environ, seconds=60.0)

    assert (said["state"], said["found"]) == ("broken", f"`{file}` is imported in its place")


def test_a_package_of_an_older_version_than_required_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{look_at_package.__module__}.version_of", lambda name: "10.0.0")

    said = in_a_line(look_at_package("pillow"))

    assert said == "broken: 10.0.0, and pillow>=12.3 is needed [pip install 'pillow>=12.3']"


def test_an_onnxruntime_without_the_provider_in_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as runtime

    assert look_at_package("onnxruntime")["found"].split(", ")[1:] == ["CPUExecutionProvider"]
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["TensorrtExecutionProvider"])
    assert look_at_package("onnxruntime")["state"] == "broken"


def test_without_a_usable_torch_the_model_is_not_checked_and_warnings_are_no_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, probes = "llama_adapter.app.command_line.doctor.command", [Probe(name="torch", state="broken", found="x")]
    monkeypatch.setattr(f"{place}.look_at_environment", lambda: probes)
    assert run_checkup(CaptionerSpec(model="nowhere"), uses=ALWAYS) == 1
    table, found, _ = capsys.readouterr().out.split("\n\n")
    assert table.split() == ["part", "state", "found", "torch", "error", "x"]
    assert found.startswith("not tried model: ")
    decoder = CaptionerSpec(decoder="nowhere")
    assert run_checkup(decoder, uses=uses_of(vision=decoder.vision_kind, has_decoder=True)) == 1
    assert "error     decoder: " in capsys.readouterr().out

    findings = [Finding(level="not tried", what="known answer", sentence="There is none")]
    monkeypatch.setattr(f"{place}._diagnose", lambda spec: findings)
    probes[0] = Probe(name="CANN", state="broken", found="x")
    assert run_checkup(CaptionerSpec(), uses=ALWAYS) == 0
    assert capsys.readouterr().out.endswith("\nno errors, 1 warning in 2 checks\n")


# torch and its extensions


def test_telemetry_of_onnxruntime_writes_no_file_in_the_home_folder(tmp_path: Path) -> None:
    program = (
        "from llama_adapter.runtime.torch_import import decline_telemetry; decline_telemetry(); import onnxruntime"
    )
    environ = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environ |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, cwd=ROOT)

    assert list(tmp_path.iterdir()) == []


def test_a_failed_extension_is_one_error_and_others_are_told_apart() -> None:
    text = "Failed to load the backend extension: x. "
    problem = describe(RuntimeError(text))

    assert (problem.exit_code, problem.sentence) == (1, "torch cannot be imported, because its extension `x` fails")
    assert f"{AUTOLOAD}=0" in problem.hint
    assert explain_torch_import(RuntimeError("out of luck")) is None
    assert explain_torch_import(ImportError(text)) is None


@pytest.mark.parametrize("is_old", [False, True])
def test_a_gpu_that_cannot_be_opened_is_broken_and_torch_is_not(is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(index: int) -> str:
        if is_old:
            raise RuntimeError("The driver is too old")
        return "Some GPU"

    def opened(index: int) -> None:
        if index == 0:
            raise DeviceError("cuda:0 is full", hint="")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", named)
    if not is_old:
        monkeypatch.setattr("llama_adapter.runtime.devices.cuda.open_cuda", opened)
    said = look_at_torch()

    fault = "broken: cuda:1 cannot be opened (The driver is too old) [`nvidia-smi` shows its driver and memory; or pass"
    assert said["state"] == "ok"
    assert in_a_line(said["gpus"]) == (f"{fault} `--device cpu`]" if is_old else "ok: 1 x Some GPU [cuda:0 is full]")


def test_a_torch_npu_that_fails_to_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/npu/test_loading.py has all of its failures."""
    assert look_at_torch_npu() == absent()
    monkeypatch.syspath_prepend(WITHOUT_CANN)
    monkeypatch.setenv("FAKE_TORCH_NPU", "libraries")
    said = look_at_torch_npu()
    assert said["found"].startswith("torch_npu is installed, but the libraries of CANN are not found (ImportError: ")
    assert (said["state"], said["hint"].partition(",")[0]) == ("broken", "install CANN")


def environment(**variables: str) -> dict[str, str]:
    """Where torch_npu is installed, and CANN is not."""
    environ = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    return environ | {"PYTHONPATH": os.pathsep.join([str(WITHOUT_CANN), str(ROOT)]), **variables}


@pytest.mark.slow
def test_a_program_that_imports_the_package_gets_the_hint_in_its_traceback() -> None:
    command = [sys.executable, "-c", "import llama_adapter; llama_adapter.Captioner.load()"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)

    # torch's own message when torch_npu fails, followed by ours.
    assert "RuntimeError: Failed to load the backend extension: torch_npu." in ran.stderr
    assert "torch cannot be imported, because its extension `torch_npu` fails: ImportError: libhccl.so" in ran.stderr
    assert f"{AUTOLOAD}=0" in ran.stderr.splitlines()[-1]


def commands(*asked: list[str], before: str = "", **variables: str) -> list[Ran]:
    return run_several(asked, before=before, environ=environment(**variables))


# The table with few packages, examined once for several commands.
EXAMINED_ONCE = """
import functools
from llama_adapter.app.command_line.doctor import command, environment
environment.PROJECT_PACKAGES = ("numpy",)
environment.SERVER_PACKAGES = environment.PAGE_PACKAGES = environment.EXPORT_PACKAGES = ()
command.look_at_environment = functools.cache(command.look_at_environment)
"""


@pytest.mark.slow
def test_the_table_of_a_machine_with_torch_npu_and_nothing_else_of_ascends(tmp_path: Path) -> None:
    uses = (["--device", "cpu"], ["--device", "npu:0"], ["--device", "npu:0", "--vision", "om"])
    asked = [["doctor", "--environment", *flags] for flags in uses]
    nowhere = {"HOME": str(tmp_path), "PATH": str(tmp_path), "CC": "/nowhere/cc"}  # no kernels are compiled
    told = commands(*asked, before=EXAMINED_ONCE, COLUMNS="80", **nowhere)
    page = told[-1].out
    names = [line[:NAME_WIDTH].strip() for line in page.splitlines()]
    in_order = ["NPU devices", "CANN", "torch", "torch_npu", "aclruntime", "ais_bench"]  # the order of installation

    assert [(one.code, one.err) for one in told] == [(0, ""), (1, ""), (1, "")]
    assert [name for name in names if name in in_order] == in_order
    assert in_words(page).endswith("to fix in this order: NPU devices, CANN, torch_npu, aclruntime, ais_bench")
    assert max(map(len, page.splitlines())) <= 80 + max(map(len, page.split()))  # paths are not wrapped
    for each in told[:2]:
        assert "the libraries of CANN are not found" in in_words(each.out)
        assert "a plain `import torch` fails" in in_words(each.out)


# The table's rows about NPUs, depending on what torch_npu reports in this process.
ROWS_OF_NPUS = """
import os, sys
from llama_adapter.app.command_line.main import main
from llama_adapter.app.command_line.doctor import command, probes
from llama_adapter.app.command_line.doctor.environment import _accelerators, _operators, _probe
said = probes.look_at_torch_npu()
cann = probes.look_at_cann(os.environ, works=said["state"] == "ok")
rows = [_accelerators(probes.list_devices(), said), _probe("CANN", cann), _probe("torch_npu", said)]
command.look_at_environment = lambda: [*rows, *_operators(said)]
"""


@pytest.mark.slow
def test_without_a_device_only_what_needs_one_fails(tmp_path: Path) -> None:
    asked = [["doctor", "--environment", "--device", device] for device in ("cpu", "npu:0")]
    nowhere = {"HOME": str(tmp_path), "PATH": str(tmp_path)}
    caption = ["caption", "x.png", "--device", "npu:0"]
    told = commands(*asked, caption, before=ROWS_OF_NPUS, FAKE_TORCH_NPU="device", **nowhere)

    assert [one.code for one in told] == [0, 1, 2]
    assert [one.out.splitlines()[-1] for one in told[:2]] == [
        "no errors in 3 checks",
        "1 error in 3 checks: NPU devices",
    ]
    assert re.fullmatch(r"error: .*there is no NPU.*\n\nhint: .*npu-smi info.*\n", told[2].err)


# The same with the real torch_npu and a stand-in for CANN.


@pytest.fixture(scope="module")
def npu() -> wheel.FakeNpu:
    try:
        return wheel.fake_npu()
    except wheel.UnavailableError as error:
        pytest.skip(str(error))


OPERATORS_OF_310P = (
    "LLaMA-7B in float16: rms_norm by npu_rms_norm, rotate by npu_apply_rotary_pos_emb, .*linear layout by "
    "FRACTAL_NZ; plain: causal_attention \\(scaled_dot_product_attention is not.*; int8 weights by "
    "npu_weight_quant_batchmatmul, int4 weights \\(npu_weight_quant_batchmatmul is not documented"
)


# The rows on each machine in the arguments. Each machine is a fork of one process, because importing torch_npu takes
# longer than the rows.
ON_MACHINES = f"""
import contextlib, io, json, sys
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu.inside import in_fork

def told():
{textwrap.indent(ROWS_OF_NPUS, "    ")}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["doctor", "--environment", "--device", "npu:0"])
    return code, out.getvalue()

load_torch_npu()
print(json.dumps([in_fork(told, **machine) for machine in json.loads(sys.argv[1])]))
"""
MACHINES = {
    f"1 x Ascend310P3 \\(family 310P\\).*{OPERATORS_OF_310P}": {"FAKE_SOC": "Ascend310P3"},
    "8 x Ascend910B3 \\(family A2\\)": {"FAKE_SOC": "Ascend910B3", "FAKE_DEVICES": "8"},
}


@pytest.mark.slow
@pytest.mark.npu_contract
def test_machines_with_the_real_torch_npu(npu: wheel.FakeNpu) -> None:
    told = npu.run("-c", ON_MACHINES, json.dumps([*MACHINES.values()])).report()

    for found, (code, page) in zip(MACHINES, told, strict=True):
        assert code == 0, page
        assert re.search(found, in_words(page))


# CANN, found by its files


@pytest.mark.usefixtures("bare")
def test_a_toolkit_is_found_with_its_packages_or_its_fault(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    cann = tmp_path / "cann"
    for folder in ("lib64", "opp", "runtime", "compiler", "x86_64-linux"):
        (cann / folder).mkdir(parents=True)
    (cann / "lib64" / "libascendcl.so").touch()
    for name, version in {"toolkit": "8.5.0", "ops": "8.5.1"}.items():
        text = f"package_name=Ascend-cann-{name}\nversion={version}\ninnerversion=V100R001\narch=x86_64\n"
        (cann / "x86_64-linux" / f"ascend_{name}_install.info").write_text(text)
    environ = {  # as set_env.sh sets it
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        "LD_LIBRARY_PATH": f"/elsewhere:{cann / 'lib64'}",
    }
    home, library = {"ASCEND_HOME_PATH": ""}, {"LD_LIBRARY_PATH": ""}
    changes = [{}, home, {"ASCEND_HOME_PATH": "/no/where"}, {"ASCEND_OPP_PATH": "/no/where"}, library, home | library]
    found = [look_at_cann({**environ, **change}, works=False) for change in changes]
    del environ["ASCEND_OPP_PATH"]

    found.append(look_at_cann(environ, works=False))
    assert [f"{one['state']}: {one['found']}".replace(str(tmp_path), "") for one in found] == snapshot


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("layout", ["cann", "cann-8.5.0", "ascend-toolkit", "nnrt"])
def test_a_toolkit_that_is_not_set_up_in_this_shell_is_found_by_its_script(layout: str, tmp_path: Path) -> None:
    script = tmp_path / "Ascend" / layout / "set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    found = look_at_cann({"HOME": str(tmp_path)}, works=False)

    assert (found["state"], found["hint"]) == ("broken", f"source {script}")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without anything from Ascend; returns its folder of programs."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("llama_adapter.runtime.graphs.toolkit.INSTALL_FOLDERS", ("~/Ascend",))
    monkeypatch.setattr("llama_adapter.app.command_line.doctor.probes.DEVICE_FILES", (tmp_path, "davinci[0-9]*"))
    return tmp_path / "bin"


# Devices, as reported by the driver's tool

NPU_SMI = Path(__file__).with_name("npu_smi.txt").read_text()


def devices(torch_npu: dict[str, Any]) -> Probe:
    return _accelerators(list_devices(), torch_npu)


def test_devices_of_the_drivers_table_and_of_torch_npu(bare: Path, snapshot: SnapshotAssertion) -> None:
    absent, unusable = {"state": "absent"}, {"state": "ok", "no_device": "no NPU is there", "no_device_hint": "look"}
    found = {"no driver": devices(absent)}
    for health in ("OK", "Alarm"):
        program(bare, "npu-smi", f"/bin/cat <<'END'\n{NPU_SMI.format(health=health)}END")
        found[health] = devices(absent)
    found["not for torch_npu"] = devices(unusable)
    program(bare, "npu-smi", "echo 'DrvMngGetConsoleLogLevel failed.'; exit 255")
    found["driver fails"] = devices(absent)
    found["only for torch_npu"] = devices({"state": "ok", "devices": ["Ascend310P3 (family 310P)"] * 2})
    assert {name: in_a_line(asdict(one)) for name, one in found.items()} == snapshot


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every file")
def test_device_files_of_another_group_are_broken(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "davinci0").touch(mode=0o000)

    assert "no permission for" in devices({"state": "absent"}).found


def test_an_atc_without_its_libraries_is_broken(bare: Path) -> None:
    assert look_at_atc()["state"] == "absent"
    text = "atc: error while loading shared libraries: libge_compiler.so: cannot open shared object file"
    program(bare, "atc", f"echo '{text}' >&2; exit 127")
    assert look_at_atc()["state"] == "broken"
    program(bare, "atc", "echo 'usage: atc <args>'")
    assert look_at_atc() == ok(str(bare / "atc"))


# ais_bench and aclruntime

SESSION = "class InferSession:\n    {}\n"


def packages(folder: Path, **modules: str) -> None:
    """Write Python modules with these names, with __ for dots."""
    for name, source in modules.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        file.write_text(source)


def test_ais_bench_is_found_with_its_generation_or_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    interface = "ais_bench__infer__interface"
    no_library = "raise ImportError('libascendcl.so: cannot open shared object')"
    installed: dict[str, dict[str, str]] = {
        "nothing": {},
        "of 2023": {interface: SESSION.format("pass")},
        "of 2024, by its session": {interface: SESSION.format("def set_context(self): pass")},
        "of 2024, by its files": {interface: SESSION.format("pass"), "ais_bench__infer__interface_check": ""},
        "another package": {"ais_bench__benchmark": ""},
        "without aclruntime": {interface: "import aclruntime"},
        "without CANN": {interface: "import aclruntime", "aclruntime": no_library},
    }
    said = {}
    for number, (name, modules) in enumerate(installed.items()):
        packages(tmp_path / str(number), **modules)
        with monkeypatch.context() as patch, mock.patch.dict(sys.modules):
            patch.syspath_prepend(tmp_path / str(number))
            said[name] = in_a_line(look_at_ais_bench())
            if "aclruntime" in modules:
                said["aclruntime"] = in_a_line(look_at_aclruntime())
            else:
                assert look_at_aclruntime() == absent()
    assert said == snapshot
