"""The doctor's table: each part of the environment is found, and each gap and failure is told with what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.doctor import cann
from llama_adapter.app.doctor.command import (
    MIN_WIDTH,
    NAME_WIDTH,
    PIPE_WIDTH,
    environment_table,
    finding_lines,
    run_checkup,
    summary,
    weigh,
)
from llama_adapter.app.doctor.environment import (
    ADVICE,
    ASCEND,
    NEEDED,
    Probe,
    fold,
    is_device,
    is_needed,
    om_device,
    uses_of,
)
from llama_adapter.app.doctor.model import Finding
from llama_adapter.app.doctor.probes import list_devices, look_at_atc, look_at_package, look_at_torch_npu
from llama_adapter.runtime.child_process import ask_child, ok
from llama_adapter.runtime.torch_import import AUTOLOAD, defer_device_extensions, explain_torch_import
from tests.app.golden import ROOT
from tests.npu import wheel

WITHOUT_CANN = ROOT / "tests" / "fakes" / "torch_npu_without_cann"
ALWAYS = uses_of()


def table(*probes: Probe, uses: frozenset[str] = ALWAYS) -> str:
    return "\n".join(environment_table(probes, uses=uses, width=PIPE_WIDTH))


def in_words(text: str) -> str:
    """Without the table's line breaks."""
    return " ".join(text.split())


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


# Weighing and printing.


@pytest.mark.parametrize(
    ("state", "device", "level"),
    [
        ("ok", "cpu", "ok"),
        ("absent", "cpu", "absent"),
        ("broken", "cpu", "warning"),
        ("absent", "npu:0", "error"),
        ("broken", "npu:1", "error"),
        ("ok", "npu", "ok"),
    ],
)
def test_a_gap_is_an_error_only_where_something_needs_it(state: Any, device: str, level: str) -> None:
    assert weigh(Probe(name="torch_npu", state=state), uses=uses_of(device=device)) == level


def test_an_om_needs_the_device_and_both_halves_of_ais_bench() -> None:
    uses = uses_of(vision="om")

    assert all(is_needed(name, uses=uses) for name in ("CANN", "NPU devices", "aclruntime", "ais_bench", "torch"))
    assert not any(is_needed(name, uses=uses) for name in ("torch_npu", "onnxruntime", "atc"))


def test_every_part_that_something_needs_has_its_advice() -> None:
    parts = {name for names in NEEDED.values() for name in names} - {"python", "CUDA devices"}

    assert parts == set(ADVICE)


def test_the_lines_of_the_table_fit_their_width_and_hints_have_their_own() -> None:
    probes = [
        Probe(name="torch", state="ok", found="2.13.0+cpu"),
        Probe(name="CANN", state="broken", found="no folder has it " * 6, hint="word " * 40),
        Probe(name="atc", state="absent", hint="short"),
    ]
    lines = environment_table(probes, uses=ALWAYS, width=PIPE_WIDTH)

    assert max(map(len, lines)) <= PIPE_WIDTH == 80
    assert lines[:2] == ["part               state    found", "torch              ok       2.13.0+cpu"]
    assert lines[2].startswith("CANN               warning  no folder has it")
    assert lines[3].startswith(" " * 28 + "folder") or lines[3].startswith(" " * 28 + "no")
    assert lines[4].startswith("                   hint:    word word")
    assert lines[-2:] == [
        "atc                absent   not installed; needed for export om",
        "                   hint:    short",
    ]


def test_control_characters_in_findings_do_not_reach_the_terminal() -> None:
    hostile = "a\x1b[2J\x9b\u202eb\rc\nd"
    lines = finding_lines([Finding(level="error", what=hostile, sentence=hostile, hint=hostile)], width=PIPE_WIDTH)

    assert all(line.isprintable() for line in lines)
    assert "a\\x1b[2J\\x9b\\u202eb c d" in lines[0]


def test_the_lines_about_a_model_fit_their_width() -> None:
    finding = Finding(level="error", what="adapter", sentence="word " * 30, hint="word " * 30)
    lines = finding_lines([finding], width=PIPE_WIDTH)

    assert max(map(len, lines)) <= PIPE_WIDTH
    starts = [line.partition("word")[0] for line in lines]
    assert starts == ["error     adapter: ", " " * 10, " " * 10, " " * 10 + "hint: ", " " * 16, " " * 16]


@pytest.mark.parametrize(("columns", "width"), [("1", MIN_WIDTH), ("77", 77), ("100000", 120)])
def test_the_table_is_as_wide_as_the_terminal_within_limits(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_adapter.app.doctor.command import terminal_width

    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width


@pytest.mark.parametrize(
    ("name", "device", "vision", "found"),
    [
        ("CANN", "cpu", "torch", "not installed; needed for --device npu, --vision om, export om"),
        ("CANN", "npu:0", "torch", "not installed; needed for --device npu"),
        ("NPU devices", "cpu", "om", "none; needed for --vision om"),
        ("numpy", "cpu", "torch", "not installed; needed for every command"),
        ("onnx", "npu:0", "om", "not installed; needed for export onnx"),
    ],
)
def test_what_is_not_there_is_said_so_with_what_needs_it(name: str, device: str, vision: str, found: str) -> None:
    assert found in in_words(table(Probe(name=name, state="absent"), uses=uses_of(device=device, vision=vision)))


def absent_ascend() -> list[Probe]:
    return [Probe(name=name, state="absent") for name in ASCEND if name != "NPU operators"]


def test_absent_parts_of_ascend_are_one_line() -> None:
    torch = Probe(name="torch", state="ok", found="2.13.0")
    folded = fold([torch, *absent_ascend()], uses=uses_of(device="cuda:0", vision="onnx"))

    assert folded[0] is torch
    assert table(*folded[1:]).splitlines()[1:] == ["Ascend             absent   nothing installed (docs/ascend.md)"]
    for flags in ({"device": "npu:0"}, {"vision": "om"}):
        assert fold(absent_ascend(), uses=uses_of(**flags)) == absent_ascend()


def test_broken_and_installed_parts_are_never_folded() -> None:
    there = [Probe(name="CANN", state="broken", found="x"), Probe(name="atc", state="ok", found="y")]
    others = [probe for probe in absent_ascend() if probe.name not in ("CANN", "atc")]
    found = "no NPU devices, no torch_npu, no aclruntime, no ais_bench installed (docs/ascend.md)"

    assert fold([*others, *there], uses=ALWAYS) == [*there, Probe(name="Ascend", state="absent", found=found)]
    assert fold(there, uses=ALWAYS) == there


def test_the_last_line_names_what_failed_once_and_in_order() -> None:
    checks = [("CANN", "error"), ("torch", "ok"), ("atc", "warning"), ("llama", "error"), ("llama", "error")]

    assert summary(checks) == ("3 errors, 1 warning in 5 checks, to fix in this order: CANN, llama", 3)
    assert summary(checks[:2]) == ("1 error in 2 checks: CANN", 1)
    assert summary(checks[1:2]) == ("no errors in 1 check", 0)


def test_devices_are_known_by_their_names_alone() -> None:
    assert all(map(is_device, ["cpu", "auto", "cuda", "cuda:1", "npu", "npu:12"]))
    others = ["", "gpu", "npu:", "npu:x", "cpu:0", "auto:0", "cuda:-1", "cuda:1 ", "npu:\u0663"]
    assert not any(map(is_device, others))


def test_an_om_runs_beside_a_decoder_of_its_kind() -> None:
    assert [om_device(name) for name in ("npu", "npu:3", "cuda:1", "cpu", "auto")] == [0, 3, None, None, None]


def test_an_onnxruntime_without_the_provider_in_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("onnxruntime")
    assert look_at_package("onnxruntime")["found"].split(", ")[1:] == ["CPUExecutionProvider"]
    monkeypatch.setattr(runtime, "get_available_providers", lambda: ["TensorrtExecutionProvider"])
    assert look_at_package("onnxruntime")["state"] == "broken"


def test_commands_and_paths_are_never_broken_in_two() -> None:
    path = "/a-folder/" * 14 + "set_env.sh"

    assert path in table(Probe(name="CANN", state="broken", found="x", hint=f"source {path}"))


def test_an_unusable_torch_keeps_the_model_from_being_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "llama_adapter.app.doctor.command.look_at_environment", lambda: [Probe(name="torch", state="broken", found="x")]
    )

    assert run_checkup("nowhere", uses=ALWAYS) == 1
    assert "not tried model: Without torch the model cannot be checked" in capsys.readouterr().out


def test_warnings_and_what_was_not_tried_are_no_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "llama_adapter.app.doctor.command.look_at_environment", lambda: [Probe(name="CANN", state="broken", found="x")]
    )
    findings = [Finding(level="not tried", what="known answer", sentence="There is none")]
    monkeypatch.setattr("llama_adapter.app.doctor.command.diagnose", lambda target, *, precision: findings)

    assert run_checkup("bundle", uses=ALWAYS) == 0
    assert capsys.readouterr().out.endswith("\nno errors, 1 warning in 2 checks\n")


# torch and its extensions.


@pytest.mark.parametrize("own", [None, "1"])
def test_extensions_wait_until_they_are_asked_for_but_for_a_users_own_choice(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AUTOLOAD, raising=False)
    if own is not None:
        monkeypatch.setenv(AUTOLOAD, own)
    defer_device_extensions()
    assert os.environ[AUTOLOAD] == (own or "0")


def test_nothing_of_this_project_leaves_a_diary_in_the_home_folder(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    program = (
        "from llama_adapter.runtime.torch_import import decline_telemetry; decline_telemetry(); import onnxruntime"
    )
    environ = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environ |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ, cwd=ROOT)

    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_not_taken_for_failed_extensions() -> None:
    assert explain_torch_import(RuntimeError("out of luck")) is None
    assert explain_torch_import(ImportError("Failed to load the backend extension: x. ")) is None


FAILURES = {
    "libraries": ("the libraries of CANN are not found", "set_env.sh"),
    "home": ("environment variables of CANN point to missing", "set_env.sh"),
    "cuda": ("built for another accelerator", "CPU build"),
    "version": ("fit neither this torch", "compatibility table"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_way_in_which_torch_npu_fails_is_told(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(WITHOUT_CANN)
    monkeypatch.setenv("FAKE_TORCH_NPU", failure)
    said = look_at_torch_npu()
    sentence, hint = FAILURES[failure]

    assert said["state"] == "broken"
    assert sentence in said["found"]
    assert hint in said["hint"]


def test_a_machine_without_torch_npu_lacks_nothing_on_the_cpu() -> None:
    assert look_at_torch_npu()["state"] == "absent"


def python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    environ |= {"PYTHONPATH": os.pathsep.join([str(WITHOUT_CANN), str(ROOT)]), **variables}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=ROOT)


@pytest.mark.slow
def test_the_fake_makes_import_torch_fail_as_torch_npu_does() -> None:
    ran = python("import torch")

    assert ran.stderr.splitlines()[-1] == (
        "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )
    assert "ImportError: libhccl.so: cannot open shared object file: No such file or directory" in ran.stderr


@pytest.mark.slow
def test_a_program_that_uses_this_project_reads_the_hint_in_its_traceback() -> None:
    ran = python("import llama_adapter; llama_adapter.Captioner.load()")

    assert "torch cannot be imported, because its extension `torch_npu` fails: ImportError: libhccl.so" in ran.stderr
    assert "hint: for that device, source the `set_env.sh`" in ran.stderr
    assert f"{AUTOLOAD}=0" in ran.stderr.splitlines()[-1]


MAIN = "import sys; from llama_adapter.app.cli import main; sys.exit(main(sys.argv[1:] or {!r}))"


@pytest.mark.slow
def test_an_extension_that_the_user_insists_on_is_an_error_in_a_sentence() -> None:
    ran = python(MAIN.format(["caption", "x.png"]), **{AUTOLOAD: "1"})

    assert ran.returncode == 1
    assert ran.stderr.startswith("error: torch cannot be imported, because its extension `torch_npu` fails")
    assert "\nhint: " in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["libraries", "device"])
def test_the_cpu_answers_whatever_is_wrong_with_torch_npu(failure: str) -> None:
    picture = str(ROOT / "assets" / "pictures" / "03-purple-triangle.png")
    ran = python(MAIN.format(["caption", picture, "--format", "text"]), FAKE_TORCH_NPU=failure)

    assert (ran.returncode, ran.stdout.strip()) == (0, f"{picture}: a small purple triangle at the top")


def assert_refused(code: int, stderr: str, *, told: tuple[str, str]) -> None:
    """Exit code 2, one sentence and a hint, with these words."""
    sentence, _, hint = stderr.partition("\n\nhint: ")

    assert code == 2
    assert sentence.startswith("error: ")
    assert "\n" not in sentence
    assert told[0] in sentence
    assert told[1] in hint


CAPTION_THERE = ["caption", "x.png", "--device", "npu:0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "told"), [("libraries", FAILURES["libraries"]), ("device", ("no NPU is", "npu-smi info"))]
)
def test_the_device_that_cannot_be_had_is_an_error_in_a_sentence(failure: str, told: tuple[str, str]) -> None:
    ran = python(MAIN.format(CAPTION_THERE), FAKE_TORCH_NPU=failure)

    assert_refused(ran.returncode, ran.stderr, told=told)


# The whole table: what it says is looked at once, and weighed for each of the arguments.
TABLES = """
import contextlib, functools, io, json, sys
from llama_adapter.app.cli import main
from llama_adapter.app.doctor import command
command.look_at_environment = functools.cache(command.look_at_environment)
told = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as page:
        code = main(["doctor", "--environment", *arguments])
    told.append([code, page.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def without_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and page on a machine that has torch_npu, and nothing else of Ascend's, for what is asked for."""
    empty = str(tmp_path_factory.mktemp("nothing"))
    asked = {"cpu": ["--device", "cpu"], "npu": ["--device", "npu:0"], "om": ["--device", "npu:0", "--vision", "om"]}
    ran = python(TABLES, json.dumps([*asked.values()]), HOME=empty, PATH=empty, COLUMNS="80")
    assert (ran.returncode, ran.stderr) == (0, "")
    return dict(zip(asked, map(tuple, json.loads(ran.stdout)), strict=True))


@pytest.mark.slow
def test_rows_stand_in_the_order_in_which_one_fixes_them(without_libraries: dict[str, tuple[int, str]]) -> None:
    _, page = without_libraries["om"]
    names = [line[:NAME_WIDTH].strip() for line in page.splitlines()]
    wanted = ["NPU devices", "CANN", "torch", "torch_npu", "aclruntime", "ais_bench"]

    assert [name for name in names if name in wanted] == wanted
    assert in_words(page).endswith("to fix in this order: NPU devices, CANN, torch_npu, aclruntime, ais_bench")
    assert max(map(len, page.splitlines())) <= 80 + len(sys.executable)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "code"), [("cpu", 0), ("npu", 1)])
def test_doctor_prints_the_failure_and_fails_only_where_the_device_is_wanted(
    device: str, code: int, without_libraries: dict[str, tuple[int, str]]
) -> None:
    ended, page = without_libraries[device]

    assert ended == code, page
    assert "the libraries of CANN are not found" in in_words(page)
    assert "a plain `import torch` fails" in in_words(page)


# Of the table, the rows that speak of NPUs: by what torch_npu says in this process.
ROWS_OF_NPUS = """
import sys
from llama_adapter.app.cli import main
from llama_adapter.app.doctor import command, probes
from llama_adapter.app.doctor.environment import _accelerators, _operators, _probe, _toolkit
said = probes.look_at_torch_npu()
rows = [_accelerators(probes.list_devices(), said), _toolkit(works=said["state"] == "ok"), _probe("torch_npu", said)]
command.look_at_environment = lambda: [*rows, *_operators(said)]
sys.exit(main(["doctor", "--environment", "--device", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "code", "last"),
    [("cpu", 0, "no errors in 3 checks"), ("npu:0", 1, "1 error in 3 checks: NPU devices")],
)
def test_a_machine_without_a_device_fails_only_where_one_is_wanted(
    device: str, code: int, last: str, tmp_path: Path
) -> None:
    ran = python(ROWS_OF_NPUS, device, FAKE_TORCH_NPU="device", HOME=str(tmp_path), PATH=str(tmp_path))

    assert (ran.returncode, ran.stderr) == (code, ""), ran.stdout
    assert ran.stdout.splitlines()[-1] == last


# The same on the real torch_npu, with a stand-in for CANN.


@pytest.fixture(scope="module")
def npu() -> wheel.FakeNpu:
    try:
        return wheel.fake_npu()
    except wheel.UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.npu_contract
def test_the_real_torch_npu_is_seen_with_its_device_and_what_would_compute(npu: wheel.FakeNpu) -> None:
    ran = npu.run("-m", "llama_adapter", "doctor", "--environment", "--device", "npu:0", soc="Ascend310P3")
    told = in_words(ran.stdout)

    assert (ran.code, ran.stderr) == (0, ""), ran.stdout
    assert "1 x Ascend310P3 (family 310P)" in told
    assert "LLaMA-7B in float16: rms_norm by npu_rms_norm, rotate by npu_apply_rotary_pos_emb," in told
    # With the reasons for plain ones.
    assert "linear layout by FRACTAL_NZ; plain: causal_attention (scaled_dot_product_attention is not" in told


@pytest.mark.slow
@pytest.mark.npu_contract
@pytest.mark.parametrize(
    ("soc", "more", "code", "told"),
    [
        ("Ascend910B3", {"FAKE_DEVICES": "8"}, 0, "8 x Ascend910B3 (family A2)"),
        (None, {}, 1, "`npu-smi info` must list one"),
        ("Ascend310P3", {"ASCEND_HOME_PATH": "/no/where"}, 1, "ASCEND_HOME_PATH is /no/where, which does not exist"),
    ],
)
def test_other_machines_with_the_real_torch_npu_are_seen_as_they_are(
    npu: wheel.FakeNpu, soc: str | None, more: dict[str, str], code: int, told: str
) -> None:
    ran = npu.run("-c", ROWS_OF_NPUS, "npu:0", soc=soc, **more)

    assert ran.code == code, ran.stderr
    assert told in in_words(ran.stdout)


def test_without_a_device_there_is_no_row_of_operators(bare: Path) -> None:
    from llama_adapter.app.doctor.environment import _operators

    assert _operators({"state": "absent"}) == []


# CANN, by its files.

INSTALL_INFO = "package_name=Ascend-cann-{name}\nversion={version}\ninnerversion=V100R001\narch=x86_64\n"


def install_toolkit(home: Path, **versions: str) -> dict[str, str]:
    """CANN's layout with these packages; returns the variables that its set_env.sh sets."""
    for folder in ("lib64", "opp", "runtime", "compiler", "x86_64-linux"):
        (home / folder).mkdir(parents=True)
    (home / "lib64" / "libascendcl.so").touch()
    for name, version in versions.items():
        text = INSTALL_INFO.format(name=name, version=version)
        (home / "x86_64-linux" / f"ascend_{name}_install.info").write_text(text)
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": f"/elsewhere:{home / 'lib64'}",
    }


def test_a_toolkit_that_is_set_up_is_found_with_its_packages(tmp_path: Path) -> None:
    environ = install_toolkit(tmp_path / "cann", toolkit="8.5.0", ops="8.5.1")

    assert cann.setup_fault(environ) == ""
    assert cann.package_versions(tmp_path / "cann") == ["toolkit 8.5.0", "ops 8.5.1"]


@pytest.mark.parametrize("layout", ["cann", "cann-8.5.0", "ascend-toolkit", "nnrt"])
def test_a_toolkit_that_was_not_set_up_is_found_by_its_script(layout: str, tmp_path: Path) -> None:
    script = tmp_path / "Ascend" / layout / "set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()

    assert script in cann.setup_scripts({"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ASCEND_HOME_PATH": "/no/where"}, "ASCEND_HOME_PATH is /no/where, which does not exist"),
        ({"ASCEND_OPP_PATH": "/no/where"}, "ASCEND_OPP_PATH is /no/where, which does not exist"),
        ({"ASCEND_OPP_PATH": None}, "and ASCEND_OPP_PATH is not set"),
        ({"LD_LIBRARY_PATH": ""}, "no folder of LD_LIBRARY_PATH has libascendcl.so"),
    ],
)
def test_what_is_wrong_with_the_variables_of_a_toolkit_is_told(
    changes: dict[str, str | None], fault: str, tmp_path: Path
) -> None:
    environ: dict[str, str | None] = {**install_toolkit(tmp_path / "cann"), **changes}

    assert fault in cann.setup_fault({name: value for name, value in environ.items() if value is not None})


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing of Ascend's; returns its folder of programs."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("llama_adapter.runtime.graphs.toolkit.INSTALL_FOLDERS", ("~/Ascend",))
    monkeypatch.setattr("llama_adapter.app.doctor.probes.DEVICE_FILES", (tmp_path, "davinci[0-9]*"))
    return tmp_path / "bin"


def test_a_forgotten_set_env_is_told_with_the_line_to_run(bare: Path, tmp_path: Path) -> None:
    from llama_adapter.app.doctor.environment import _toolkit

    install_toolkit(tmp_path / "Ascend" / "cann", toolkit="8.5.0")
    (tmp_path / "Ascend" / "cann" / "set_env.sh").touch()
    probe = _toolkit(works=False)

    assert (probe.state, probe.hint) == ("broken", f"source {tmp_path}/Ascend/cann/set_env.sh")
    assert "not set up in this shell" in probe.found


def test_a_machine_without_a_toolkit_lacks_it(bare: Path) -> None:
    from llama_adapter.app.doctor.environment import _toolkit

    assert _toolkit(works=False).state == "absent"


# Devices, by the driver's own tool.

NPU_SMI = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2.1                               Version: 24.1.rc2.1                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1853 / 21527                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 2       310P3                 | {health:<15} | NA           45                0     / 0             |
| 0       1                     | 0000:02:00.0    | 0            1853 / 21527                            |
+===============================+=================+======================================================+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| 1       0                     | 1712733         | python                   | 120                       |
+===============================+=================+======================================================+
"""


def devices(torch_npu: dict[str, Any]) -> Probe:
    from llama_adapter.app.doctor.environment import _accelerators

    return _accelerators(list_devices(), torch_npu)


@pytest.mark.parametrize(
    ("health", "torch_npu", "state", "found"),
    [
        ("OK", {"state": "absent"}, "ok", "2 x 310P3, driver 24.1.rc2.1"),
        ("Alarm", {"state": "absent"}, "ok", "1 x 310P3, 1 x 310P3 in health Alarm, driver 24.1.rc2.1"),
        (
            "OK",
            {"state": "ok", "no_device": "no NPU is there", "no_device_hint": "look"},
            "broken",
            "2 x 310P3, driver 24.1.rc2.1, but no NPU is there",
        ),
    ],
)
def test_devices_are_counted_by_their_name_in_the_drivers_table(
    bare: Path, health: str, torch_npu: dict[str, Any], state: Any, found: str
) -> None:
    program(bare, "npu-smi", f"/bin/cat <<'END'\n{NPU_SMI.format(health=health)}END")

    hint = torch_npu.get("no_device_hint", "")
    assert devices(torch_npu) == Probe(name="NPU devices", state=state, found=found, hint=hint)


def test_devices_of_torch_npu_count_more_than_the_drivers_tool(bare: Path) -> None:
    assert devices({"state": "absent"}).state == "absent"
    program(bare, "npu-smi", "echo 'DrvMngGetConsoleLogLevel failed.'; exit 255")
    listed = devices({"state": "absent"})
    assert (listed.state, "DrvMngGetConsoleLogLevel failed." in listed.found) == ("broken", True)
    seen = devices({"state": "ok", "devices": ["Ascend310P3 (family 310P)"] * 2})
    assert seen.found.startswith("2 x Ascend310P3 (family 310P)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every file")
def test_device_files_of_another_group_are_told(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "davinci0").touch(mode=0o000)

    assert "no permission for" in devices({"state": "absent"}).found


def test_an_atc_without_its_libraries_is_told(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.runtime.graphs.toolkit.INSTALL_FOLDERS", ())
    assert look_at_atc()["state"] == "absent"
    text = "atc: error while loading shared libraries: libge_compiler.so: cannot open shared object file"
    program(bare, "atc", f"echo '{text}' >&2; exit 127")
    assert look_at_atc()["state"] == "broken"
    program(bare, "atc", "echo 'usage: atc <args>'")
    assert look_at_atc() == ok(str(bare / "atc"))


# ais_bench and aclruntime.

SESSION = "class InferSession:\n    {}\n"


def packages(folder: Path, **modules: str) -> None:
    """Python modules by their names, with __ for the dots."""
    for name, source in modules.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        file.write_text(source)


def look_at(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(folder)
    return ask_child(f"llama_adapter.app.doctor.probes:look_at_{name}", environ=os.environ, seconds=60)


@pytest.mark.parametrize(
    ("modules", "state", "words", "hint"),
    [
        ({}, "absent", "", ""),
        ({"ais_bench__infer__interface": SESSION.format("pass")}, "ok", "as of 2023", ""),
        (
            {"ais_bench__infer__interface": SESSION.format("def set_context(self): pass")},
            "ok",
            "of 2024 or newer",
            "",
        ),
        (
            {"ais_bench__infer__interface": SESSION.format("pass"), "ais_bench__infer__interface_check": ""},
            "ok",
            "of 2024 or newer",
            "",
        ),
        ({"ais_bench__benchmark": ""}, "broken", "not Ascend's", "ais-bench-benchmark"),
        ({"ais_bench__infer__interface": "import aclruntime"}, "broken", "aclruntime, is not", "ais_bench"),
        (
            {
                "ais_bench__infer__interface": "import aclruntime",
                "aclruntime": "raise ImportError('libascendcl.so: cannot open shared object file')",
            },
            "broken",
            "CANN's libraries are not found",
            "set_env.sh",
        ),
    ],
)
def test_ais_bench_is_found_with_its_generation_or_with_what_it_lacks(
    modules: dict[str, str], state: str, words: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path, **modules)
    said = look_at("ais_bench", tmp_path, monkeypatch)

    assert said["state"] == state
    assert words in said["found"]
    assert hint in said["hint"]


def test_aclruntime_without_the_libraries_of_cann_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "libascendcl.so: cannot open shared object file: No such file or directory"
    packages(tmp_path, aclruntime=f"raise ImportError({text!r})")
    said = look_at("aclruntime", tmp_path, monkeypatch)

    assert said["state"] == "broken"
    assert text in said["found"]
    assert "set_env.sh" in said["hint"]
