"""A GPU whose memory does not suffice: fewer rows at once give the same answers, and the error is explained."""

import gc

import pytest
import torch

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.problems import describe, is_out_of_memory
from tests.app.captioning.test_oom_retry import quiet, read, said
from tests.cuda.device import DEVICE, IS_GPU, loaded

pytestmark = pytest.mark.skipif(not IS_GPU, reason="no CUDA device here")

PROMPT = " ".join(60 * ["What color is the shape?"])  # so long that a prefill needs more memory than the encoder


@pytest.mark.proves("fewer rows when memory is short", "CUDA")
def test_a_job_that_runs_out_of_memory_goes_on_with_fewer_rows() -> None:
    loaded.cache_clear()  # other models could leave holes in torch's memory
    gc.collect()
    captioner = loaded(operators="aten", mode="eager")  # graphs would hold their memory between the runs
    notes = quiet(captioner)
    expected = said(read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4))
    needed = torch.cuda.max_memory_allocated() - used
    assert notes == []

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + 0.6 * needed) / total)
    try:
        told = said(read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        loaded.cache_clear()  # this one has fewer rows now
    print(f"16 rows need {needed / 1e6:.0f} MB; with 60 % of it: {notes}")
    assert told == expected
    assert "out of memory with 16 rows: going on with 8" in notes


def test_the_devices_own_error_is_explained() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, device=DEVICE)

    problem = describe(caught.value)
    assert is_out_of_memory(caught.value)
    assert problem.sentence.startswith("The memory is not enough: CUDA out of memory. Tried to allocate")
    assert problem.hint == "try a smaller --batch-size"
