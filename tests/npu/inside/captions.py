"""The embedded model on the fake NPU and on the CPU, through `Captioner`: the way that a user's pictures go."""

from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from tests.npu.inside.host_ops import HostOps

NUM_PICTURES = 5  # on 3 slots: admitted late, freed early
PROMPTS = ["Generate caption of this image", "How many shapes are there?"]  # of different lengths


def answers(device: str) -> list[tuple[str, list[int], str]]:
    captioner = Captioner.load(device=device, dtype="float32", batch_size=3)
    pictures = sorted(sample_pictures().iterdir())[:NUM_PICTURES]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(pictures))]
    given = captioner.generate(pictures, prompts, max_new_tokens=20)
    given += captioner.generate(pictures[:2], "What colour is the shape?", choices=["red", "blue", "yellow"])
    return [(answer.text, list(answer.token_ids), answer.finish) for answer in given]


def comparison() -> dict[str, Any]:
    expected = answers("cpu")
    mode = HostOps()
    with mode:
        given = answers("npu:0")
    return {"expected": expected, "given": given, "calls": mode.calls}
