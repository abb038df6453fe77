"""A machine whose memory is short for the kernels' scratch answers all pictures, fewer of them at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.kernels import scratch
from llama_adapter.runtime.kernels.library import find_library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels"),
]


def test_pictures_are_answered_with_what_scratch_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble_parts(CaptionerSpec(device="cpu", dtype="float32", batch_size=8))
    pictures = sorted(sample_pictures().glob("*.*g"))[:12]
    asked: list[int] = []
    limits: list[int] = []
    plain = scratch._allocated

    def allocated(num_bytes: int) -> scratch._Scratch:
        asked.append(num_bytes)
        is_too_much = any(num_bytes > limit for limit in limits)
        return plain(2**60 if is_too_much else num_bytes)  # more than any machine has, for torch's own error

    def answered() -> tuple[list[tuple[int, ...]], list[str]]:
        captioner, notes = Captioner(parts), list[str]()
        captioner.oom_retry.tell = notes.append
        with ThreadPoolExecutor(1) as pool:  # a new thread, which holds no scratch yet
            answers = pool.submit(captioner.generate, pictures, max_new_tokens=6).result()
        assert all(answer.error is None for answer in answers)
        return [answer.token_ids for answer in answers], notes

    monkeypatch.setattr(scratch, "_allocated", allocated)
    expected, notes = answered()
    assert notes == []
    limits.append(max(asked) // 5)  # for one picture in the encoder, and a prompt or two
    answers, notes = answered()

    assert answers == expected
    assert notes[0].endswith("pictures in the encoder: going on with 4")
    assert any(note.endswith(("rows: going on with 1", "rows: going on with 2")) for note in notes)
