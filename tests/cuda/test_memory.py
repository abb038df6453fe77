"""A GPU whose memory does not suffice: fewer rows at once give the same answers, and the error is explained."""

from collections.abc import Callable, Iterator

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.problems import describe, is_out_of_memory
from tests.app.captioning.test_oom_retry import quiet, read, said
from tests.cuda.device import DEVICE, IS_GPU

pytestmark = pytest.mark.skipif(not IS_GPU, reason="no CUDA device here")

ROWS = 256
PICTURES = 8 * sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
PROMPT = " ".join(60 * ["What color is the shape?"])  # long, so that a prefill needs far more than the encoder


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Limits the bytes that torch may take on the GPU."""

    def limit(num_bytes: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.proves("fewer rows when memory is short", "CUDA")
def test_a_job_that_runs_out_of_memory_goes_on_with_fewer_rows(limit: Callable[[int], None]) -> None:
    captioner = Captioner.load(device=DEVICE, dtype="float32", batch_size=ROWS)
    notes = quiet(captioner)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    expected = said(read(captioner.stream(PICTURES, PROMPT, max_new_tokens=4)))
    needed = torch.cuda.max_memory_allocated() - used
    assert notes == []

    limit(reserved + needed * 6 // 10)
    assert said(read(captioner.stream(PICTURES, PROMPT, max_new_tokens=4))) == expected

    print(f"{needed / 1e6:.0f} MB needed for {ROWS} rows; with 60 % of it: {notes}")
    assert len(expected) == len(PICTURES) == ROWS
    assert f"out of memory with {ROWS} rows: going on with {ROWS // 2}" in notes


def test_the_devices_own_error_is_explained() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, device=DEVICE)

    problem = describe(caught.value)
    assert is_out_of_memory(caught.value)
    assert problem.sentence.startswith("The memory is not enough: CUDA out of memory. Tried to allocate 32768.00 GiB")
    assert problem.hint == "try a smaller --batch-size"
