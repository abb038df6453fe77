"""What a user reads when an OM cannot be used: a sentence naming model, wanted and given, and what to do next."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.om_failures import (
    KINDS,
    NAMES,
    CodeKind,
    find_code,
    import_failed,
    opening_failed,
    running_failed,
)
from llama_adapter.runtime.graphs.sidecar import sidecar_path
from tests.fakes.exported import make_om, open_om, sample_pixels

pytestmark = pytest.mark.slow


def refusal(path: Path, *, device_id: int = 0) -> GraphError:
    with pytest.raises(GraphError) as caught:
        open_om(path, device_id=device_id)
    assert str(path) in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.fixture
def om(tmp_path: Path) -> Path:
    return make_om(tmp_path / "clip.om", [1, 4])


# The installation


@pytest.mark.parametrize(
    ("folders", "said", "hint"),
    [
        ((), "needs ais_bench, which is not installed", "neither part is on PyPI"),
        (("clash",), "not Ascend's: it has no `ais_bench.infer`", "uninstall"),
        (("2024", "aclruntime", "no_cann"), "CANN's libraries are not found: libascendcl.so", "set_env.sh"),
    ],
)
def test_what_the_installation_lacks_is_told(
    install: Callable[..., None], om: Path, folders: tuple[str, ...], said: str, hint: str
) -> None:
    install(*folders)
    with pytest.raises(GraphError) as caught:
        open_om(om)
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_half_an_ais_bench_is_told(install: Callable[..., None], om: Path, tmp_path: Path, monkeypatch: Any) -> None:
    install("2024")
    session = shutil.copy(Path(__file__).parents[2] / "fakes/ais_bench/aclruntime/ais_bench_session.py", tmp_path)
    monkeypatch.syspath_prepend(str(Path(session).parent))
    with pytest.raises(GraphError, match="its other part, aclruntime, is not"):
        open_om(om)


@pytest.mark.parametrize(
    ("error", "sentence", "hint"),
    [
        (
            ModuleNotFoundError("No module named 'attr'", name="attr"),
            "ais_bench needs the package attr",
            "pip install attrs",
        ),
        (
            ModuleNotFoundError("No module named 'utils'", name="utils"),  # on the index there is one, of a stranger
            "cannot be imported: it finds no module utils",
            "is incomplete: docs/ascend.md",
        ),
        (
            SystemError("initialization failed"),
            "cannot be imported: SystemError: initialization failed",
            "build it again",
        ),
        (
            ImportError("undefined symbol: aclrtSetDeviceSatMode"),
            "undefined symbol: aclrtSetDeviceSatMode",
            "this CANN",
        ),
    ],
)
def test_other_failures_of_the_import_say_what_came(error: Exception, sentence: str, hint: str) -> None:
    explained = import_failed(error)
    assert sentence in explained.message
    assert hint in explained.hint


def test_what_the_import_printed_is_in_the_message(install: Callable[..., None], om: Path, tmp_path: Path) -> None:
    package = tmp_path / "broken" / "ais_bench" / "infer"
    package.mkdir(parents=True)
    (package / "interface.py").write_text(
        "import os\nos.write(1, b'[ERROR] driver too old')\nraise SystemError('init')\n"
    )
    install()
    sys.path.insert(0, str(tmp_path / "broken"))
    try:
        with pytest.raises(GraphError) as caught:
            open_om(om)
    finally:
        sys.path.remove(str(tmp_path / "broken"))
    assert caught.value.message.endswith("SystemError: init. It said: [ERROR] driver too old")


# Codes: what each says, whether the file is being opened or run

SENTENCES: dict[CodeKind, str] = {
    "memory": "the memory of device 3 is not enough",
    "device": "the device 3 cannot be opened",
    "context": "its context on the device is gone",
    "parameter": "ACL refused a value that ais_bench gave it",
    "file": "it is damaged, was made for another chip",
    "batch": "the batch size is not one it was compiled for",
    "execution": "it failed on device 3",
}


@pytest.mark.parametrize("code", KINDS)
def test_a_code_is_told_by_its_meaning_and_its_name(code: int) -> None:
    error = RuntimeError(f"[{code}][Error code unknown] ")
    opening = opening_failed(error, said="", file="a.om", soc="", device=3)
    running = running_failed(error, said="", file="a.om", soc="", device=3, wanted="these", given="those")
    for explained in (opening, running):
        assert f": {SENTENCES[KINDS[code]]}" in explained.message
        assert f"({code} is {NAMES[code]})" in explained.message
        assert explained.hint
    others = [text for kind, text in SENTENCES.items() if kind != KINDS[code]]
    assert not any(text in explained.message for text in others for explained in (opening, running))


def test_memory_and_context_are_these_codes_only() -> None:
    """Bad parameters, unknown devices and such were once told as either."""
    assert {code for code, kind in KINDS.items() if kind == "memory"} == {200000, 207001, 207018, 245000}
    assert {code for code, kind in KINDS.items() if kind == "context"} == {107002, 107003}
    assert [KINDS[code] for code in (100000, 107000, 107001, 507033)] == ["parameter", "parameter", "device", "device"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("[507033][Error code unknown] ", 507033),
        ("acl execute failed:507011", 507011),
        ("aclrtMalloc failed, ret 207001", 207001),
        ("ret=107002", 107002),
        ("[ERROR] error code is 207001", 207001),
        ("ret[100000]", 100000),
        ("[1][ACL: invalid parameter] | [ERROR] acl execute failed:1 | ret 207001", 207001),
        ("in size:100000 needsize:200000 not match", None),
        ("given float16 (1, 224, 224, 3) of 200000 bytes", None),
        ("[999999][Error code unknown] ", None),
        ("load model /models/507033.om failed", None),
    ],
)
def test_codes_are_told_from_other_numbers(words: str, code: int | None) -> None:
    assert find_code(words) == code


def test_a_code_that_nobody_knows_is_shown_as_it_came() -> None:
    error = RuntimeError("[999999][Error code unknown] ")
    explained = opening_failed(error, said="", file="a.om", soc="", device=0)
    assert explained.message == "ais_bench cannot load `a.om`. It said: [999999][Error code unknown]"


# The file


def test_a_file_made_for_another_chip_names_both_places_to_look(
    acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    error = refusal(om)
    assert "(made for Ascend310P3): it is damaged, was made for another chip" in error.message
    assert "[1][ACL: invalid parameter] |" in error.message
    assert "the device is Ascend910B3" in error.message  # what stood on stdout only
    assert "llama-adapter export om --soc-version" in error.hint
    assert "npu-smi info" in error.hint


def test_a_damaged_file_is_told(acl: Any, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.om"
    corrupt.write_bytes(b"noise")
    corrupt.chmod(0o640)
    error = refusal(corrupt)
    assert "it is damaged" in error.message
    assert "magic number" in error.message


def test_a_device_that_cannot_be_opened_is_named(acl: Any, om: Path) -> None:
    error = refusal(om, device_id=3)
    assert "the device 3 cannot be opened" in error.message
    assert "[507033]" in error.message
    assert "ASCEND_RT_VISIBLE_DEVICES" in error.hint
    assert "HwHiAiUser" in error.hint
    assert "--encoder-device N" in error.hint


def test_what_infer_session_would_refuse_never_reaches_it(acl: Any, om: Path, tmp_path: Path) -> None:
    om.chmod(0o660)
    assert refusal(om).hint.startswith("chmod 640")
    assert "holds no .om file" in refusal(Path(__file__).parent).message
    assert acl.RECORD.loaded == 0


def test_the_side_car_of_another_file_is_noticed_by_its_digest(acl: Any, om: Path) -> None:
    with open(om, "ab") as file:
        file.write(b"\n")
    error = refusal(om)
    assert "the digests differ" in error.message
    assert acl.RECORD.loaded == 0


def test_gears_without_a_side_car_are_refused_and_it_is_asked_for(acl: Any, om: Path) -> None:
    sidecar_path(om).unlink()
    error = refusal(om)
    assert "`clip.om.json`" in error.message
    assert "several batch sizes (gears)" in error.message
    assert acl.RECORD.freed == 1


def test_a_side_car_with_other_gears_is_noticed_by_the_bytes(acl: Any, om: Path, tmp_path: Path) -> None:
    other = make_om(tmp_path / "other.om", [1, 8])
    text = sidecar_path(other).read_text()
    own = sidecar_path(om).read_text()
    digest = own[own.index('"sha256"') :].split('"')[3]
    foreign = text[text.index('"sha256"') :].split('"')[3]
    sidecar_path(om).write_text(text.replace(foreign, digest))
    assert "is not the expected batch 1, 8" in refusal(om).message


@pytest.mark.parametrize(
    ("change", "said"),
    [({"dtype": "float32"}, "float32 (2, 224, 224, 3)"), ({"shape": [-1, 224, 224, 3]}, "float16 (any, 224, 224, 3)")],
)
def test_a_side_car_that_tells_of_another_input_is_refused(
    acl: Any, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    om = make_om(tmp_path / "clip.om", [2])
    values = json.loads(sidecar_path(om).read_text())
    values["input"] |= change
    sidecar_path(om).write_text(json.dumps(values))

    error = refusal(om)

    assert f"takes float16 (2, 224, 224, 3), and its side-car says that it takes {said}" in error.message
    assert acl.RECORD.freed == 1


def test_a_file_that_cannot_be_described_is_told_with_what_was_printed(
    acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any) -> None:
        acl.say("ERROR", "get input desc failed")
        raise acl.failure(-1)

    monkeypatch.setattr(acl.InferenceSession, "get_inputs", fail)

    error = refusal(om)

    assert "cannot load" in error.message
    assert "[ERROR] get input desc failed" in error.message
    assert acl.RECORD.freed == 1


def test_an_unloading_that_fails_is_logged(
    acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        acl.say("ERROR", "unload model failed")
        raise acl.failure(-1)

    encoder: Any = open_om(om)
    monkeypatch.setattr(acl.InferenceSession, "free_resource", fail)
    encoder.close()

    assert f"cannot unload `{om}`" in caplog.text
    assert "unload model failed" in caplog.text


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [2, 3, 224, 224]}, "takes float16 (2, 3, 224, 224), and pictures are given as (B, S, S, 3): colour"),
        ({"dtype": "uint8"}, "takes pixels of uint8, and an encoder takes float32 or float16"),
        ({"dtype": "int8"}, "takes pixels of int8"),
        ({"shape": [2, 224, 224, 3, 1]}, "takes float16 (2, 224, 224, 3, 1)"),
    ],
)
def test_another_layout_or_type_is_refused_even_where_the_bytes_are_equal(
    acl: Any, changes: dict[str, Any], words: str, sidecar: bool, tmp_path: Path
) -> None:
    error = refusal(make_om(tmp_path / "clip.om", [2], sidecar=sidecar, input=changes))
    assert ("its side-car says that it takes float16 (2, 224, 224, 3)" if sidecar else words) in error.message
    assert ("AIPP" in error.hint) == (changes.get("dtype") == "uint8")
    assert acl.RECORD.calls[-1][1] == "free"


def test_an_output_that_is_no_visual_query_is_refused(acl: Any, tmp_path: Path) -> None:
    assert "gives float16 (1, 1920)" in refusal(make_om(tmp_path / "a.om", [1], output={"shape": [1, 1920]})).message
    assert "its graph makes (9, 192)" in refusal(make_om(tmp_path / "b.om", [1], output={"shape": [1, 9, 192]})).message


def test_files_of_two_encoders_or_of_one_batch_size_do_not_go_together(acl: Any, tmp_path: Path) -> None:
    make_om(tmp_path / "a.om", [1])
    make_om(tmp_path / "b.om", [1])
    assert "has two files for a batch of 1" in refusal(tmp_path).message
    make_om(tmp_path / "b.om", [4], sidecar=False)
    sidecar_path(tmp_path / "b.om").unlink()
    assert "are not of one model" in refusal(tmp_path).message
    assert acl.RECORD.loaded == acl.RECORD.freed == 4


# The call


def test_a_failure_on_the_device_names_model_wanted_and_given(
    acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Any = open_om(om)
    monkeypatch.setenv("FAKE_FAIL", "execute")
    with pytest.raises(GraphError) as caught:
        encoder.encode(sample_pixels()[:3])
    assert (
        f"cannot run `{om}` (made for Ascend310P3), which takes float16 (any, 224, 224, 3) of batch 1, 4 and was given "
        "float16 (4, 224, 224, 3) of 1,204,224 bytes: it failed on device 0." in caught.value.message
    )
    assert "[ERROR] acl execute failed:1" in caught.value.message
    assert "~/ascend/log" in caught.value.hint
    monkeypatch.delenv("FAKE_FAIL")
    assert len(encoder.encode(sample_pixels()[:3])) == 3  # and it can go on
    encoder.close()


def test_a_context_that_was_taken_away_is_told(acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = open_om(om)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("[107002][Error code unknown] ")

    monkeypatch.setattr(encoder.session._files[0]._session, "infer", fail)
    with pytest.raises(GraphError, match="something reset the device in this process") as caught:
        encoder.encode(sample_pixels()[:1])
    assert "process of its own" in caught.value.hint
    encoder.close()


def test_memory_that_is_short_is_told(acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        acl.say("ACL ERROR", "EL0004: Failed to allocate memory.")
        raise acl.failure(1)

    monkeypatch.setattr(acl, "InferenceSession", fail)
    assert "the memory of device 0 is not enough" in refusal(om).message
