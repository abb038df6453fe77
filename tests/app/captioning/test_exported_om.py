"""Captioners on a decoder in OM files, with stand-ins for ATC and ais_bench, give the same answers as torch."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner, GraphError, TextDelta
from tests.app.captioning.test_exported import CHOICES, DRAWN, PROMPTS, SAMPLE_PROMPTS, SAMPLES
from tests.app.exported import om_embedded, om_golden
from tests.app.golden import model_options
from tests.parity.exported import choice_limit
from tests.parity.golden import GROUPS, batch
from tests.parity.test_captioner import answer
from tests.runtime.graphs import conftest

install = conftest.install  # a fixture


@pytest.fixture(autouse=True)
def _ais_bench(install: Callable[..., None]) -> None:
    install("")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.proves("token ids of the reference", "OM")
@pytest.mark.proves("Meta LLaMA and adapter", "OM")
@pytest.mark.proves("BIAS adapters", "OM")
@pytest.mark.proves("LORA adapters", "OM")
@pytest.mark.proves("CAPTION adapters (one query)", "OM")
def test_golden_cases_have_the_ids_of_the_reference(group: str, batch_size: int) -> None:
    case = batch(group, num_rows=batch_size)
    options = {**model_options(case["adapter"]), "exif": "ignore", "transparency": "ignore"}
    options["context"] = case["max_seq_len"]
    with Captioner.load(decoder=om_golden(case["adapter"]), batch_size=batch_size, **options) as captioner:
        made = answer(captioner, case, as_ids=False)

    assert made == list(zip(case["output_ids"], case["output_text"], strict=True))


@pytest.mark.parametrize("name", ["decoder.om", "prefix.om"])
def test_an_om_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    """The other model has the same sizes."""
    folder = shutil.copytree(om_golden("BIAS-TINY"), tmp_path / "mixed")
    for file in (name, f"{name}.json"):
        shutil.copy(Path(om_golden("training-checkpoint-0")) / file, folder)

    with pytest.raises(GraphError, match="compiled from another export"):
        Captioner.load(decoder=str(folder), **model_options("BIAS-TINY"))


@pytest.fixture(scope="module")
def torchs() -> Captioner:
    return Captioner.load(dtype="float32", batch_size=16)


@pytest.fixture(scope="module")
def wanted_ids(torchs: Captioner) -> list[Sequence[int]]:
    return [one.token_ids for one in torchs.generate(SAMPLES, SAMPLE_PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.proves("embedded model", "OM")
@pytest.mark.proves("continuous batching", "OM")
def test_sample_pictures_have_torchs_answers(wanted_ids: list[Sequence[int]], batch_size: int) -> None:
    decoder, encoder = om_embedded()
    with Captioner.load(decoder=decoder, encoder=encoder, batch_size=batch_size) as captioner:
        made = captioner.generate(SAMPLES, SAMPLE_PROMPTS)

    assert captioner.info.device == "ais_bench (device 0)"
    assert [one.token_ids for one in made] == wanted_ids


@pytest.mark.slow
@pytest.mark.proves("choices by scoring", "OM")
@pytest.mark.proves("streaming", "OM")
def test_answers_are_drawn_streamed_and_chosen_as_by_torch(torchs: Captioner) -> None:
    def answers(captioner: Captioner) -> tuple[Any, list[Any]]:
        drawn = captioner.generate(SAMPLES[:16], SAMPLE_PROMPTS[:16], **DRAWN)
        pieces = [event.text for event in captioner.stream(SAMPLES[0], PROMPTS[1]) if isinstance(event, TextDelta)]
        chosen = captioner.generate(SAMPLES[:7], PROMPTS[1], choices=CHOICES)
        return ([one.token_ids for one in drawn], pieces), [one.choice for one in chosen]

    decoder, encoder = om_embedded()
    with Captioner.load(decoder=decoder, encoder=encoder, batch_size=5) as captioner:
        made, shares = answers(captioner)

    wanted, wanted_shares = answers(torchs)
    assert made == wanted
    for share, other in zip(shares, wanted_shares, strict=True):
        assert share == pytest.approx(other, abs=choice_limit())
