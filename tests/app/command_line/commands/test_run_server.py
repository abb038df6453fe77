"""From flags to a server's settings: invalid flags are refused before any model is loaded; `label` before its page."""

import datetime
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_adapter.app.command_line.commands import run_server
from llama_adapter.app.command_line.commands.run_server import API_KEY_VARIABLE, ServeJob, check_packages, read_api_keys
from llama_adapter.app.command_line.doctor.environment import PAGE_PACKAGES, SERVER_PACKAGES
from llama_adapter.app.command_line.doctor.probes import IMPORT_NAMES
from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.terminal.logs import Log
from tests.app.pictures.inputs.files import fill


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Restore the log afterwards."""
    root = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = root
    log = logging.getLogger("llama_adapter")
    log.handlers.clear()
    log.propagate = True


def test_a_line_of_the_log_holds_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    Log(level="info", log_format="text", quiet=True)
    logging.getLogger("llama_adapter.service").error("it said: %s", "a\x1b[2J\nb")

    assert capsys.readouterr().err.endswith(" it said: a\\x1b[2J\\nb\n")


def test_lines_of_json_hold_the_fields_of_a_record_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(level="info", log_format="json", quiet=False)
    log.tell("a note")
    logging.getLogger("llama_adapter.access").info("GET %s", "/v1", extra={"fields": {"status": 200, "key": "Zoë\n"}})
    logging.getLogger("llama_adapter.access").debug("a file of the page")
    logging.getLogger("another library").warning("careful")

    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one["level"], one["message"]) for one in lines] == [
        ("info", "a note"),
        ("info", "GET /v1"),
        ("warning", "careful"),
    ]
    assert (lines[1]["status"], lines[1]["key"], lines[1]["logger"]) == (200, "Zoë\n", "llama_adapter.access")
    assert abs(datetime.datetime.fromisoformat(lines[0]["time"]).timestamp() - time.time()) < 60


def test_a_level_above_info_leaves_notes_out_and_quiet_keeps_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    Log(level="warning", log_format="json", quiet=False).tell("a note")
    log = Log(level="debug", log_format="text", quiet=True)
    log.tell("a note")
    log.announce("serving on http://127.0.0.1:8000")
    logging.getLogger("llama_adapter.access").info("GET /v1")

    assert capsys.readouterr().err == "serving on http://127.0.0.1:8000\n"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[ServeJob]:
    """The jobs that would have been served."""
    served: list[ServeJob] = []
    monkeypatch.setattr(run_server, "run_serve", lambda job, **_: served.append(job) or ExitCode.OK)  # type: ignore[func-returns-value]
    return served


@pytest.mark.parametrize(("command", "port", "has_page"), [("serve", 8000, False), ("web", 7860, True)])
def test_without_flags_it_serves_the_embedded_model_to_this_machine_and_a_llama_alone_too(
    jobs: list[ServeJob], command: str, port: int, has_page: bool
) -> None:
    assert main([command]) == ExitCode.OK
    assert jobs == [
        ServeJob(spec=CaptionerSpec(), limits=ServiceLimits(), has_page=has_page, host="127.0.0.1", port=port)
    ]
    assert main([command, "--llama-dir", "LLaMA"]) == ExitCode.OK
    assert jobs[1].spec.is_llama_alone


def test_flags_reach_the_job(jobs: list[ServeJob]) -> None:
    flags = "--host 0.0.0.0 --port 0 --host-name a.example --host-name b.example --allow-url-host pictures.example "
    flags += "--served-model-name a --served-model-name b --cors-origin https://a.example "
    flags += "--root-path /a --close docs --close metrics "
    flags += "--batch-folder kept --max-file-mib 5 --max-files 6 --max-files-mib 7 "
    flags += "--max-waiting 7 --timeout-s 3.5 --batch-size 2 --precision int8 --drain-s 1 --quiet "
    flags += "--log-level debug --log-format json"
    assert main(["serve", *flags.split()]) == ExitCode.OK
    (job,) = jobs
    assert (job.host, job.port, job.drain_s, job.quiet) == ("0.0.0.0", 0, 1.0, True)
    assert (job.host_names, job.allowed_hosts) == (("a.example", "b.example"), ("pictures.example",))
    assert (job.model_names, job.cors_origins) == (("a", "b"), ("https://a.example",))
    settings = run_server.api_settings(job, keys={"a-long-key": "alice"})
    assert (settings.model_names, settings.guards.cors_origins) == (("a", "b"), ("https://a.example",))
    assert (settings.guards.api_keys, settings.guards.key_names) == (("a-long-key",), ("alice",))
    assert (job.log_level, job.log_format) == ("debug", "json")
    assert (settings.guards.root_path, settings.guards.closed) == ("/a", ("docs", "metrics"))
    assert (job.batch_folder, job.max_file_mib, job.max_files, job.max_files_mib) == ("kept", 5, 6, 7)
    assert (job.limits.max_waiting, job.limits.timeout_s) == (7, 3.5)
    assert (job.spec.batch_size, job.spec.precision) == (2, "int8")


def test_keys_come_from_a_file_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "from-environment")
    file = tmp_path / "keys"
    file.write_text("\ufeff# for the lab\nfirst-key-1\n\nsecond-key  Alice B.\n")
    file.chmod(0o600)

    names = {"from-environment": "key 1", "first-key-1": "key 2", "second-key": "Alice B."}
    assert read_api_keys(str(file)) == names
    file.chmod(0o644)
    with pytest.raises(UsageError, match="readable by others"):
        read_api_keys(str(file))
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert read_api_keys(None) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"# nothing\n", "no key"),
        (b"short\n", "8 characters"),
        (b"a b c d e\n", "8 char"),
        (b"\xff\xfe\0binary" * 9, "8 char"),
    ],
)
def test_a_file_without_usable_keys_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, words: str
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    file = tmp_path / "keys"
    file.write_bytes(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match=words) as refused:
        read_api_keys(str(file))
    assert "short" not in str(refused.value)


@pytest.mark.parametrize(("has_page", "missing"), [(False, "uvicorn"), (False, "python_multipart"), (True, "gradio")])
def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, has_page: bool, missing: str) -> None:
    for name in (*SERVER_PACKAGES, *PAGE_PACKAGES):
        monkeypatch.setitem(sys.modules, IMPORT_NAMES.get(name, name), sys)  # any existing module serves
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=missing.replace("_", "-")) as refused:
        check_packages(has_page=has_page)
    assert ("[web]" if has_page else "[serve]") in refused.value.hint


def test_an_address_in_use_and_a_model_that_cannot_be_loaded_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == ExitCode.FAILED
    assert main(["serve", "--port", "0", "--model", "no-such-bundle"]) == ExitCode.FAILED

    said = capsys.readouterr().err
    assert f"port {port}: address already in use" in said
    assert "no-such-bundle" in said
    assert "Traceback" not in said


def label(folder: Path, *inputs: str) -> int:
    names = [str(folder / name) for name in inputs]
    return main(["label", *names, "--choices", "a,b", "--out", str(folder / "labels.csv")])


def test_without_any_picture_the_reasons_are_said_and_nothing_is_served(
    tmp_path: Path, jobs: list[ServeJob], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "classes/a/1.png", "empty/notes.txt")

    assert label(tmp_path, "classes", "empty", "missing.jpg") == ExitCode.PICTURE_ERRORS
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(f"which has none of its own, but folders in it; '{tmp_path}/classes/**' looks into them.")
    assert second.startswith("error: Wanted a picture file, got the folder")
    assert third.startswith("error: Wanted a picture file, found no file")
    assert not jobs


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["classes/a"], "1 picture found, 0 rows in "),
        (["classes", "classes/a"], "1 picture found, 0 rows in "),
        (["classes/a", "classes/b"], "2 pictures found, 0 rows in "),
        (["missing.jpg", "classes/**"], "2 pictures found, 0 rows in "),
    ],
)
def test_a_single_picture_is_enough_to_serve(
    inputs: list[str], said: str, tmp_path: Path, jobs: list[ServeJob], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "classes/a/1.png", "classes/b/2.png")

    assert label(tmp_path, *inputs) == ExitCode.OK
    assert said in capsys.readouterr().err
    assert len(jobs) == 1
