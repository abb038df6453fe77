"""OM files in the fake ais_bench: torch's numbers at every batch size, one thread, and no resources left behind."""

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, is_same_model
from llama_adapter.runtime.graphs.om_session import OmThread
from llama_adapter.runtime.graphs.sidecar import read_sidecar, write_sidecar
from tests.fakes.exported import make_om, open_om, query_limit, sample_pixels, sample_queries

pytestmark = pytest.mark.slow


def difference(queries: np.ndarray, start: int = 0) -> float:
    return float((torch.from_numpy(queries).float() - sample_queries()[start : start + len(queries)]).abs().max())


def sizes_run(acl: Any) -> list[int]:
    return [shape[0] for _, what, shape in acl.RECORD.calls if what == "run"]


@pytest.mark.parametrize(
    ("dtype", "batch_sizes", "pictures", "calls"),
    [
        ("float16", [1], slice(32), [1] * 32),
        ("float16", [5], slice(32), [5] * 7),
        ("float32", [1, 4, 8], slice(32), [8] * 4),
        ("float16", [1, 4, 8], slice(3, 6), [4]),
        ("float16", [1, 4, 8], slice(3, 8), [4, 1]),
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
        write_sidecar(om, dataclasses.replace(sidecar, card=None))

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
        threading.Thread(target=lambda encoder=encoder: [encoder.encode(sample_pixels()[:5]) for _ in range(3)])
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


def test_stdout_and_the_root_logger_stay_as_they_are(
    install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    install("")
    print("one")
    encoder = open_om(make_om(tmp_path / "clip.om", [1, 4]))
    print("two")
    encoder.encode(sample_pixels()[:5])
    print("three")
    encoder.close()
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr() == ("one\ntwo\nthree\n", "")
    assert (logging.root.handlers, logging.root.level) == ([], logging.WARNING)


def test_data_on_a_pipe_stays_data_also_without_close(tmp_path: Path) -> None:
    """Runs in a separate process: C flushes its buffer for a pipe only at exit, and the encoder is freed then."""
    make_om(tmp_path / "clip.om", [1, 4])
    fakes = Path(__file__).resolve().parents[2] / "fakes" / "ais_bench"
    code = f"""
import atexit, json, sys, weakref
weakref.finalize(sys, bool)  # weakref now has its own place among what is done at the end
sys.path.insert(0, {str(fakes)!r})
import numpy as np
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.vision.backends.exported import open_encoder
atexit.register(print, "after others that were there before", file=sys.stderr)
encoder = open_encoder(GraphSpec(kind="om", path={str(tmp_path / "clip.om")!r}))
print(json.dumps(list(encoder.encode(np.zeros((5, 224, 224, 3), dtype=np.uint8)).shape)))
sys.modules["aclruntime"].InferenceSession.free_resource = lambda self: print("freed", file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[5, 10, 192]\n"
    assert result.stderr == "freed\nafter others that were there before\n"


def test_the_file_decides_the_types(acl: Any, tmp_path: Path) -> None:
    """ATC has options to keep or change the types of inputs and outputs."""
    om = make_om(tmp_path / "clip.om", [1], dtype="float32", output={"dtype": "float16"})
    with contextlib.closing(open_om(om)) as encoder:
        assert encoder.encode(sample_pixels()[:1]).dtype == np.float16
