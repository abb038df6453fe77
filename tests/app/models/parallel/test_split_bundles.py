"""Ranks that read their own files give the same answers as one process."""

from pathlib import Path

import pytest

from llama_adapter import Captioner
from llama_adapter.app.command_line.doctor.model import diagnose, write_known_answer
from llama_adapter.app.models.packed_bundle import split_bundle
from llama_adapter.app.models.resources import embedded_model
from tests.app.models.parallel.test_ranks import SAMPLES

pytestmark = pytest.mark.slow


def test_a_split_bundle_answers_as_the_whole_one(tmp_path: Path) -> None:
    with Captioner.load(batch_size=4) as alone:
        wanted = [answer.text for answer in alone.generate(SAMPLES)]
    split = split_bundle(embedded_model(), tmp_path / "split", num_ranks=2)
    with Captioner.load(split, batch_size=4, tensor_parallel=2) as pair:
        assert [answer.text for answer in pair.generate(SAMPLES)] == wanted
    assert write_known_answer(split)
    findings = diagnose(split)
    assert {finding.level for finding in findings} == {"ok"}
    assert any("about its own picture" in finding.sentence for finding in findings)
