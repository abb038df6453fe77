"""OM files in the fake ais_bench: torch's numbers at every batch size, one thread, and no resources left behind."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, is_same_model
from llama_adapter.runtime.graphs.om_failures import BY_CODE, find_code, import_failed, opening_failed, running_failed
from llama_adapter.runtime.graphs.om_session import OmThread
from llama_adapter.runtime.graphs.sidecar import read_sidecar, sidecar_path, write_sidecar
from tests.fakes.exported import make_om, open_om, query_limit, sample_pixels, sample_queries

pytestmark = pytest.mark.slow


def difference(queries: np.ndarray, start: int = 0) -> float:
    return float((torch.from_numpy(queries).float() - sample_queries()[start : start + len(queries)]).abs().max())


def sizes_run(acl: Any) -> list[int]:
    return [shape[0] for _, what, shape in acl.RECORD.calls if what == "run"]


@pytest.mark.parametrize(
    ("dtype", "batch_sizes", "pictures", "calls"),
    [
        ("float16", [1], slice(2), [1] * 2),
        ("float16", [5], slice(32), [5] * 7),
        ("float16", [1, 4, 8], slice(3, 6), [4]),
        ("float32", [1, 4, 8], slice(3, 16), [8, 4, 1]),
    ],
)
@pytest.mark.proves("visual query of the reference", "OM")
@pytest.mark.proves("any number of pictures", "OM")
def test_pictures_get_torchs_visual_query_by_the_cheapest_calls(
    acl: Any, dtype: Any, batch_sizes: Sequence[int], pictures: slice, calls: list[int], tmp_path: Path
) -> None:
    with contextlib.closing(open_om(make_om(tmp_path / "clip.om", batch_sizes, dtype=dtype))) as encoder:
        queries = encoder.encode(sample_pixels()[pictures])

    assert (len(queries), queries.dtype) == (len(sample_pixels()[pictures]), dtype)
    assert difference(queries, start=pictures.start or 0) <= query_limit(dtype)
    assert sizes_run(acl) == calls


@pytest.mark.proves("several batch sizes", "OM")
def test_a_folder_of_fixed_files_is_one_encoder_of_several_batch_sizes(acl: Any, tmp_path: Path) -> None:
    for size in (4, 1):
        make_om(tmp_path / f"clip_bs{size}.om", [size])
    encoder = open_om(tmp_path)
    assert encoder.batch_sizes == (1, 4)
    assert difference(encoder.encode(sample_pixels()[:7])) <= query_limit("float16")
    assert sizes_run(acl) == [4, 4]
    encoder.close()
    assert acl.RECORD.freed == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "other", "dtype": "float16"}, True),
        ({"fingerprint": {"clip": "00 1.5001"}}, True),  # rounding changes the last digits
        ({"fingerprint": {"clip": "00 1.6"}}, False),
        ({"fingerprint": {"clip": "01 1.5"}}, False),
        ({"fingerprint": {"clip": "00 1.5 1.5"}}, False),
        ({"fingerprint": {}}, False),
        ({"config": {"channel_order": "bgr"}}, False),
    ],
)
def test_files_of_one_model_have_its_sizes_and_its_weights_up_to_rounding(
    change: dict[str, Any], expected: bool
) -> None:
    config, weights = {"channel_order": "rgb"}, {"clip": "00 1.5"}
    card = GraphCard(name="a", config=config, dtype="float32", opset=18, fingerprint=weights)

    assert is_same_model(card, dataclasses.replace(card, **change)) is expected


def test_a_forked_process_cannot_use_the_files(acl: Any, tmp_path: Path) -> None:
    encoder = open_om(make_om(tmp_path / "clip.om", [1]))
    thread: OmThread = encoder.session._thread  # type: ignore[attr-defined]
    with thread._lock:  # as if another thread called the session
        child = os.fork()
        if not child:
            signal.alarm(10)  # ends a process that waits for the lock
            said = 1
            try:
                encoder.encode(sample_pixels()[:1])
            except GraphError as error:
                encoder.close()
                said = 0 if "forked" in error.message else 2
            finally:
                thread._finalizer()  # as at the end of a program
                os._exit(said if not acl.RECORD.freed else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(encoder.encode(sample_pixels()[:1])) == 1
    encoder.close()


@pytest.mark.parametrize("batch_sizes", [[2], [1, 4]])
def test_an_encoder_of_another_program_has_no_card(acl: Any, batch_sizes: list[int], tmp_path: Path) -> None:
    """A file with a fixed batch size needs no sidecar; a file with gears needs one for its batch sizes."""
    om = make_om(tmp_path / "clip.om", batch_sizes, sidecar=len(batch_sizes) > 1)
    if sidecar := read_sidecar(om):
        write_sidecar(om, dataclasses.replace(sidecar, card=None).to_json())

    with contextlib.closing(open_om(om)) as encoder:
        assert (encoder.card, encoder.batch_sizes, encoder.image_size) == (None, tuple(batch_sizes), 224)
        assert difference(encoder.encode(sample_pixels()[:5])) <= query_limit("float16")


@pytest.mark.parametrize("generation", [2023, 2024])
def test_the_time_on_the_device_is_that_of_the_last_call(
    acl: Any, generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_AIS_BENCH", str(generation))
    encoder: Any = open_om(make_om(tmp_path / "clip.om", [1]))
    assert (encoder.card.name, encoder.card.dtype, encoder.name) == ("embedded", "float16", "ais_bench (device 0)")
    assert encoder.device_ms is None
    encoder.encode(sample_pixels()[:2])
    assert encoder.device_ms > 0
    session = encoder.session._thread._opened[0]._session
    assert session.summary().exec_time_list == []
    session.reset_summaryinfo = lambda: None
    session.summary = lambda: acl.Summary([(10.0, 17.5)] if generation >= 2024 else [7.5])
    encoder.encode(sample_pixels()[:2])
    assert encoder.device_ms == 15.0
    session.summary = lambda: acl.Summary([])
    encoder.encode(sample_pixels()[:1])
    assert encoder.device_ms is None
    encoder.close()


@pytest.mark.parametrize("num_encoders", [1, 2])
def test_everything_happens_in_one_thread(acl: Any, num_encoders: int, tmp_path: Path) -> None:
    context = acl.STATE.context
    om = make_om(tmp_path / "clip.om", [1, 4])
    encoders = [open_om(om) for _ in range(num_encoders)]
    threads = [
        threading.Thread(target=lambda encoder=encoder: [encoder.encode(sample_pixels()[:2]) for _ in range(3)])
        for encoder in encoders * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for encoder in encoders:
        encoder.close()

    seen = {thread for thread, _, _ in acl.RECORD.calls}
    assert len(seen) == num_encoders
    assert threading.get_ident() not in seen
    assert acl.RECORD.most_concurrent == 1
    assert acl.STATE.context == context
    assert (acl.RECORD.loaded, acl.RECORD.freed, acl.RECORD.finalized) == (num_encoders, num_encoders, 0)


def test_closing_or_dropping_a_session_frees_it_and_ends_its_thread(acl: Any, tmp_path: Path) -> None:
    encoder = open_om(make_om(tmp_path / "clip.om", [1]))
    assert any("ais_bench" in thread.name for thread in threading.enumerate())
    for _ in range(2):
        encoder.close()
    assert acl.RECORD.freed == 1
    assert not any("ais_bench" in thread.name for thread in threading.enumerate())
    with pytest.raises(GraphError, match="was closed"):
        encoder.encode(sample_pixels()[:1])

    dropped = open_om(tmp_path / "clip.om")
    del dropped
    gc.collect()
    assert acl.RECORD.freed == 2


def test_data_on_a_pipe_stays_data_also_without_close(tmp_path: Path) -> None:
    """Runs in a separate process: C flushes its buffer for a pipe only at exit, and the encoder is freed then."""
    make_om(tmp_path / "clip.om", [1, 4])
    fakes = Path(__file__).resolve().parents[2] / "fakes" / "ais_bench"
    code = f"""
import atexit, json, logging, sys, weakref
weakref.finalize(sys, bool)  # weakref now has its own place among what is done at the end
sys.path.insert(0, {str(fakes)!r})
import numpy as np
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.vision.backends.exported import open_encoder
atexit.register(print, "after others that were there before", file=sys.stderr)
encoder = open_encoder(GraphSpec(kind="om", path={str(tmp_path / "clip.om")!r}))
print(json.dumps(list(encoder.encode(np.zeros((5, 224, 224, 3), dtype=np.uint8)).shape)))
print(logging.root.handlers, logging.root.level)
sys.modules["aclruntime"].InferenceSession.free_resource = lambda self: print("freed", file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[5, 10, 192]\n[] 30\n"
    assert result.stderr == "freed\nafter others that were there before\n"


def test_the_file_decides_the_types(acl: Any, tmp_path: Path) -> None:
    """ATC has options to keep or change the types of inputs and outputs."""
    om = make_om(tmp_path / "clip.om", [1], dtype="float32", output={"dtype": "float16"})
    with contextlib.closing(open_om(om)) as encoder:
        assert encoder.encode(sample_pixels()[:1]).dtype == np.float16


# Errors name the file and the next step for the user


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


def test_an_unusable_installation_and_failures_of_the_import_are_explained(
    install: Callable[..., None], om: Path, snapshot: SnapshotAssertion
) -> None:
    explained = [
        import_failed(ModuleNotFoundError("No module named 'aclruntime'", name="aclruntime")),
        import_failed(ModuleNotFoundError("No module named 'attr'", name="attr")),
        import_failed(SystemError("initialization failed")),
    ]
    for folders in ((), ("clash",), ("", "no_cann")):
        install(*folders)
        with pytest.raises(GraphError) as caught:
            open_om(om)
        explained.append(caught.value)

    assert "\n".join(f"{error.message}\n    {error.hint}" for error in explained) == snapshot


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


# Codes: they mean the same when the file is opened and when it is run


def test_each_meaning_of_a_code_has_a_sentence_and_a_hint(snapshot: SnapshotAssertion) -> None:
    shown = []
    for meaning in dict.fromkeys(BY_CODE.values()):
        codes = sorted(code for code, other in BY_CODE.items() if other == meaning and code < 560000)
        error = RuntimeError(f"[{codes[0]}][Error code unknown] ")
        opening = opening_failed(error, said="", file="a.om", soc="", device=3)
        running = running_failed(error, said="", file="a.om", soc="", device=3, wanted="these", given="those")
        assert running.message.rpartition(": ")[2] == opening.message.rpartition(": ")[2]
        shown.append(f"{' '.join(map(str, codes))}\n    {opening.message}\n    {opening.hint}")
    assert "\n".join(shown) == snapshot


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
def test_codes_are_distinguished_from_other_numbers(words: str, code: int | None) -> None:
    assert find_code(words) == code


@pytest.mark.parametrize(
    ("words", "said", "explained"),
    [
        (
            "[1][ACL: invalid parameter] ",
            "EL0004: Failed to allocate memory.",
            ": the memory of device 0 is not enough.",
        ),
        ("[999999][Error code unknown] ", "", ". It said: [999999][Error code unknown]"),
    ],
)
def test_without_a_known_code_the_words_decide_or_are_quoted(words: str, said: str, explained: str) -> None:
    error = opening_failed(RuntimeError(words), said=said, file="a.om", soc="", device=0)
    assert error.message.startswith(f"ais_bench cannot load `a.om`{explained}")


# The file


def test_the_runtimes_words_on_stdout_are_in_the_message(
    acl: Any, om: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "[507033]" in refusal(om, device_id=3).message
    assert "EE1001: Set device failed" in refusal(om, device_id=3).message
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    error = refusal(om)
    assert "(made for Ascend310P3): it is damaged, was made for another chip" in error.message
    assert "the device is Ascend910B3" in error.message
    om.write_bytes(b"noise")
    sidecar_path(om).unlink()
    assert "magic number" in refusal(om).message


def test_files_that_infer_session_refuses_never_reach_it(acl: Any, om: Path) -> None:
    om.chmod(0o660)
    assert refusal(om).hint.startswith("chmod 640")
    assert "holds no .om file" in refusal(Path(__file__).parent).message
    om.chmod(0o640)
    with open(om, "ab") as file:
        file.write(b"\n")
    assert "the digests differ" in refusal(om).message
    assert acl.RECORD.loaded == 0


def test_gears_need_their_own_side_car(acl: Any, om: Path) -> None:
    sidecar = read_sidecar(om)
    assert sidecar is not None
    write_sidecar(om, dataclasses.replace(sidecar, batch_sizes=(1, 8)).to_json())
    assert "is not the expected batch 1, 8" in refusal(om).message
    sidecar_path(om).unlink()
    assert "`clip.om.json`" in refusal(om).message
    assert acl.RECORD.freed == 2


def test_a_file_without_a_description_is_an_error_with_the_runtimes_words(
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


def test_a_failed_unload_is_logged(
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
def test_another_layout_or_type_of_equal_bytes_is_refused(
    acl: Any, changes: dict[str, Any], words: str, sidecar: bool, tmp_path: Path
) -> None:
    error = refusal(make_om(tmp_path / "clip.om", [2], sidecar=sidecar, input=changes))
    assert ("its side-car says that it takes float16 (2, 224, 224, 3)" if sidecar else words) in error.message
    assert ("AIPP" in error.hint) == (changes.get("dtype") == "uint8")
    assert acl.RECORD.calls[-1][1] == "free"


def test_the_output_must_be_a_visual_query(acl: Any, tmp_path: Path) -> None:
    assert "gives float16 (1, 1920)" in refusal(make_om(tmp_path / "a.om", [1], output={"shape": [1, 1920]})).message
    assert "its graph makes (9, 192)" in refusal(make_om(tmp_path / "b.om", [1], output={"shape": [1, 9, 192]})).message


def test_a_folder_holds_one_model_and_one_file_per_batch_size(acl: Any, tmp_path: Path) -> None:
    make_om(tmp_path / "a.om", [1])
    make_om(tmp_path / "b.om", [1])
    assert "has two files for a batch of 1" in refusal(tmp_path).message
    make_om(tmp_path / "b.om", [4], sidecar=False)
    sidecar_path(tmp_path / "b.om").unlink()
    assert "are not of one model" in refusal(tmp_path).message
    assert acl.RECORD.loaded == acl.RECORD.freed == 4


# The call


def test_a_failed_call_names_the_model_and_the_arrays(acl: Any, om: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder: Any = open_om(om)
    monkeypatch.setenv("FAKE_FAIL", "execute")
    with pytest.raises(GraphError) as caught:
        encoder.encode(sample_pixels()[:3])
    assert (
        f"cannot run `{om}` (made for Ascend310P3), which takes float16 (any, 224, 224, 3) of batch 1, 4 and was given "
        "float16 (4, 224, 224, 3) of 1,204,224 bytes: it failed on device 0." in caught.value.message
    )
    assert "[ERROR] acl execute failed:1" in caught.value.message
    monkeypatch.delenv("FAKE_FAIL")
    assert len(encoder.encode(sample_pixels()[:3])) == 3  # it still works afterwards
    encoder.close()
