"""Past keys and values before prompts, in MindIR graphs."""

from pathlib import Path

import numpy as np
import pytest

from llama_adapter import Captioner
from llama_adapter.app.models.resources import sample_pictures
from tests.mindspore.models import embedded, exported

NUM_PAST = 5


@pytest.mark.proves("prefix tuning", "MindSpore")
def test_answers_behind_a_past_are_those_of_torch(tmp_path: Path) -> None:
    sizes = embedded().decoder_config
    shape = (sizes.num_layers, 2, sizes.num_heads, NUM_PAST, sizes.head_dim)
    np.save(tmp_path / "pre_caches.npy", np.random.default_rng(4).normal(scale=0.3, size=shape).astype(np.float32))
    pictures, question = sorted(sample_pictures().iterdir())[:3], "Is there a red star?"

    found = []
    for options in ({"dtype": "float32"}, {"decoder": exported()}):
        with Captioner.load(past_key_values=tmp_path, batch_size=2, device="cpu", **options) as captioner:  # type: ignore[arg-type]
            texts = [one.token_ids for one in captioner.generate(pictures, question, max_new_tokens=16)]
            chosen = captioner.generate(pictures[:1], question, choices=["Yes", "No"])[0].choice
        found.append((texts, chosen))

    assert found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)
