"""OM files through the fake ais_bench: the numbers of torch at every batch size, one thread, nothing left behind."""

import contextlib
import dataclasses
import gc
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import EncoderCard
from llama_adapter.runtime.graphs.sidecar import read_sidecar, write_sidecar
from llama_adapter.vision.backends.om import OmVisionBackend
from tests.fakes.exported import make_om, sample_pixels, sample_queries

pytestmark = pytest.mark.slow

LIMITS = {"float32": 2e-5, "float16": 6e-3}


def difference(queries: torch.Tensor, start: int = 0) -> float:
    return float((queries.float() - sample_queries()[start : start + len(queries)]).abs().max())


def sizes_run(acl: Any) -> list[int]:
    return [shape[0] for _, what, shape in acl.RECORD.calls if what == "run"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "batch_sizes"), [("float16", [1]), ("float16", [5]), ("float16", [1, 4, 8]), ("float32", [1, 4, 8])]
)
def test_all_sample_pictures_get_the_visual_query_of_torch(
    acl: Any, dtype: Any, batch_sizes: Sequence[int], tmp_path: Path
) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", batch_sizes, dtype=dtype))

    queries = backend.encode(sample_pixels())

    assert queries.dtype == getattr(torch, dtype)
    assert difference(queries) < LIMITS[dtype]
    expected = {1: [1] * 32, 5: [5] * 7, 8: [8] * 4}
    assert sizes_run(acl) == expected[max(batch_sizes)]
    backend.close()


@pytest.mark.parametrize(("num_pictures", "sizes"), [(1, [1]), (3, [4]), (5, [4, 1]), (7, [8]), (12, [8, 4])])
def test_a_partial_batch_takes_the_gears_that_cost_least(
    acl: Any, num_pictures: int, sizes: list[int], tmp_path: Path
) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1, 4, 8]))
    queries = backend.encode(sample_pixels()[3 : 3 + num_pictures])
    assert len(queries) == num_pictures
    assert difference(queries, start=3) < LIMITS["float16"]
    assert sizes_run(acl) == sizes
    backend.close()


def test_a_folder_of_fixed_files_is_one_encoder_of_several_batch_sizes(acl: Any, tmp_path: Path) -> None:
    for size in (4, 1):
        make_om(tmp_path / f"clip_bs{size}.om", [size])
    backend = OmVisionBackend(tmp_path)
    assert backend.batch_sizes == (1, 4)
    assert difference(backend.encode(sample_pixels()[:7])) < LIMITS["float16"]
    assert sizes_run(acl) == [4, 4]
    backend.close()
    assert acl.RECORD.freed == 2


def change_card(om: Path, change: Callable[[EncoderCard], EncoderCard]) -> None:
    sidecar = read_sidecar(om)
    assert sidecar is not None
    assert sidecar.card is not None
    write_sidecar(om, dataclasses.replace(sidecar, card=change(sidecar.card)))


def in_another_order(card: EncoderCard) -> EncoderCard:
    return dataclasses.replace(card, vision=dataclasses.replace(card.vision, channel_order="bgr"))


def with_one_head(card: EncoderCard) -> EncoderCard:
    query = dataclasses.replace(card.vision.query, num_heads=1)
    return dataclasses.replace(card, vision=dataclasses.replace(card.vision, query=query))


def of_other_weights(card: EncoderCard) -> EncoderCard:
    return dataclasses.replace(card, fingerprint={**card.fingerprint, "clip": "00 1.0"})


@pytest.mark.parametrize("change", [in_another_order, with_one_head, of_other_weights])
def test_a_folder_of_files_that_answer_differently_is_refused(
    acl: Any, change: Callable[[EncoderCard], EncoderCard], tmp_path: Path
) -> None:
    """The same picture would get another visual query by the size of its batch."""
    for size in (1, 4):
        make_om(tmp_path / f"clip_bs{size}.om", [size])
    change_card(tmp_path / "clip_bs4.om", change)

    with pytest.raises(GraphError, match="are not of one encoder"):
        OmVisionBackend(tmp_path)

    assert acl.RECORD.freed == acl.RECORD.loaded


def test_a_folder_of_one_encoders_exports_in_two_precisions_is_one_encoder(acl: Any, tmp_path: Path) -> None:
    """Rounding moves the last digits of a fingerprint."""

    def rounded(card: EncoderCard) -> EncoderCard:
        signs, first, *rest = card.fingerprint["clip"].split(" ")
        told = " ".join([signs, f"{float(first) * 1.0001:.5g}", *rest])
        assert told != card.fingerprint["clip"]
        return dataclasses.replace(card, name="other", fingerprint={**card.fingerprint, "clip": told})

    for size in (1, 4):
        make_om(tmp_path / f"clip_bs{size}.om", [size])
    change_card(tmp_path / "clip_bs4.om", rounded)

    with contextlib.closing(OmVisionBackend(tmp_path)) as backend:
        assert backend.batch_sizes == (1, 4)


def test_a_process_that_was_forked_off_leaves_the_sessions_alone(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1]))
    child = os.fork()
    if not child:
        said = 1
        try:
            backend.encode(sample_pixels()[:1])
        except GraphError as error:
            said = 0 if "forked" in error.message else 2
        finally:
            backend._finalizer()  # as at the end of a program
            os._exit(said if not acl.RECORD.freed else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(backend.encode(sample_pixels()[:1])) == 1
    backend.close()


def test_a_fixed_file_without_a_side_car_is_taken_at_its_own_word(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [2], sidecar=False))
    assert (backend.card, backend.batch_sizes, backend.image_size) == (None, (2,), 224)
    assert difference(backend.encode(sample_pixels()[:3])) < LIMITS["float16"]
    backend.close()


def test_gears_of_an_encoder_from_elsewhere_are_known_by_its_side_car(acl: Any, tmp_path: Path) -> None:
    om = make_om(tmp_path / "clip.om", [1, 4])
    sidecar = read_sidecar(om)
    assert sidecar is not None
    write_sidecar(om, dataclasses.replace(sidecar, card=None))

    backend = OmVisionBackend(om)

    assert (backend.card, backend.batch_sizes) == (None, (1, 4))
    assert difference(backend.encode(sample_pixels()[:5])) < LIMITS["float16"]
    backend.close()


def test_what_the_side_car_says_is_known(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1, 4]))
    assert backend.card is not None
    assert (backend.card.name, backend.card.dtype, backend.name) == ("embedded", "float16", "ais_bench (device 0)")
    assert backend.device_ms is None
    backend.encode(sample_pixels()[:5])
    first = backend.device_ms
    assert first is not None
    assert first > 0
    backend.close()


def test_time_on_the_device_is_that_of_the_last_call_only(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1]))
    backend.encode(sample_pixels()[:2])
    session = backend._sessions[0]._session
    assert session.summary().exec_time_list == []
    session.reset_summaryinfo = lambda: None
    session.summary = lambda: acl.Summary([(10.0, 17.5)] if acl.GENERATION >= 2024 else [7.5])
    backend.encode(sample_pixels()[:2])
    assert backend.device_ms == 15.0
    session.summary = lambda: acl.Summary([])
    backend.encode(sample_pixels()[:1])
    assert backend.device_ms is None
    backend.close()


def test_everything_happens_in_one_thread_that_is_not_the_callers(acl: Any, tmp_path: Path) -> None:
    context = acl.STATE.context
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1, 4]))
    threads = [
        threading.Thread(target=lambda: [backend.encode(sample_pixels()[:5]) for _ in range(3)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.close()

    seen = {thread for thread, _, _ in acl.RECORD.calls}
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    assert acl.RECORD.most_concurrent == 1
    assert acl.STATE.context == context
    assert (acl.RECORD.loaded, acl.RECORD.freed, acl.RECORD.finalized) == (1, 1, 0)


def test_several_encoders_do_not_run_at_once_in_one_process(acl: Any, tmp_path: Path) -> None:
    om = make_om(tmp_path / "clip.om", [1])
    backends = [OmVisionBackend(om) for _ in range(2)]
    threads = [threading.Thread(target=backend.encode, args=(sample_pixels()[:6],)) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert acl.RECORD.most_concurrent == 1
    for backend in backends:
        backend.close()


def test_closing_twice_frees_once_and_ends_the_thread(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1]))
    assert any("ais_bench" in thread.name for thread in threading.enumerate())
    for _ in range(2):
        backend.close()
    assert acl.RECORD.freed == 1
    assert not any("ais_bench" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_an_encoder_that_nobody_uses_any_more_is_freed(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1]))
    backend.encode(sample_pixels()[:1])
    del backend
    gc.collect()
    assert acl.RECORD.freed == 1


def test_nothing_is_said_on_stdout(acl: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    print("one")
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [1, 4]))
    print("two")
    backend.encode(sample_pixels()[:5])
    print("three")
    backend.close()
    acl.LIBC.fflush(None)
    captured = capfd.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert captured.err == ""


def test_the_root_logger_is_left_as_it_was(install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    install("2024", "aclruntime")
    OmVisionBackend(make_om(tmp_path / "clip.om", [1])).close()
    assert logging.root.handlers == []
    assert logging.root.level == logging.WARNING


@pytest.mark.slow
def test_data_on_a_pipe_stays_data_also_where_nobody_closes(tmp_path: Path) -> None:
    """A program of its own: C's buffer for a pipe is emptied at the end only, and the encoder is freed there."""
    make_om(tmp_path / "clip.om", [1, 4])
    fakes = Path(__file__).resolve().parents[2] / "fakes" / "ais_bench"
    code = f"""
import atexit, json, sys, weakref
weakref.finalize(sys, bool)  # weakref now has its own place among what is done at the end
sys.path[:0] = [{str(fakes / "2024")!r}, {str(fakes / "aclruntime")!r}]
import numpy as np
from llama_adapter.vision.backends.om import OmVisionBackend
from llama_adapter.runtime.graphs.sidecar import read_sidecar, write_sidecar
atexit.register(print, "after others that were there before", file=sys.stderr)
backend = OmVisionBackend({str(tmp_path / "clip.om")!r})
print(json.dumps(list(backend.encode(np.zeros((5, 224, 224, 3), dtype=np.uint8)).shape)))
sys.modules["aclruntime"].InferenceSession.free_resource = lambda self: print("freed", file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [5, 10, 192]
    assert result.stdout.count("\n") == 1
    assert result.stderr == "freed\nafter others that were there before\n"


def test_an_om_that_keeps_float32_outside_is_given_float32(acl: Any, tmp_path: Path) -> None:
    """ATC can be told to keep or change the type at the border, so the file's own word counts, not its card's."""
    om = make_om(tmp_path / "clip.om", [1], dtype="float32", output={"dtype": "float16"})
    backend = OmVisionBackend(om)
    assert backend.encode(sample_pixels()[:1]).dtype == torch.float16
    backend.close()


def test_pixels_are_given_as_one_contiguous_block(acl: Any, tmp_path: Path) -> None:
    backend = OmVisionBackend(make_om(tmp_path / "clip.om", [2]))
    mirrored = sample_pixels()[:2, :, ::-1]
    assert torch.equal(backend.encode(mirrored), backend.encode(np.ascontiguousarray(mirrored)))
    backend.close()
