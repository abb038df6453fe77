"""Models that see pictures as tokens in MindIR graphs."""

from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.exported.parity import compare
from llama_adapter.runtime.graphs.card import GraphDtype
from llama_adapter.runtime.graphs.defaults import MindirBackend
from tests.app.picture_models import Reference, pictures, save
from tests.llm.test_picture_tokens import PLAIN, check_pictures
from tests.llm.toys import EOS_ID, eager, rounding, toy_decoder
from tests.mindspore.models import mindir_runner

# Of log-probabilities. Rounding causes 4e-6 and 2e-3; with the pictures of other ids they differ by 0.8 and more.
LIMITS: dict[GraphDtype, float] = {"float32": 1e-5, "float16": 1e-2}


@pytest.mark.parametrize(("backend", "dtype"), [("ms", "float32"), ("ms", "float16"), ("mslite", "float32")])
def test_pictures_give_what_the_ids_of_their_embeddings_give(
    backend: MindirBackend, dtype: GraphDtype, mslite: Any, tmp_path: Path
) -> None:
    """MindSpore Lite runs prompts in the prefill graph, MindSpore in that of increments."""
    decoder = toy_decoder(PLAIN)
    runner = mindir_runner(decoder, tmp_path, num_slots=4, backend=backend, dtype=dtype, embeddings=True)
    for scored in (False, True):
        check_pictures(Engine(runner, eos_id=EOS_ID), decoder.embedding.weight, scored=scored, limit=LIMITS[dtype])


def test_logits_behind_pictures_differ_by_rounding_only(tmp_path: Path) -> None:
    decoder = toy_decoder(PLAIN)
    runner = mindir_runner(decoder, tmp_path, num_slots=3, embeddings=True)
    parity = compare(runner.program, eager(decoder, num_slots=3))
    assert parity.max_abs < rounding(PLAIN)
    assert parity.num_same == parity.num_tokens


@pytest.mark.parametrize("kind", ["llava", "smolvlm"])
@pytest.mark.parametrize("backend", ["ms", "mslite"])
@pytest.mark.proves("LLaVA, SmolVLM, Idefics3 (pictures as tokens)", "MindSpore")
def test_answers_are_those_of_transformers(backend: MindirBackend, kind: str, mslite: Any, tmp_path: Path) -> None:
    """MindSpore Lite reads no card of the encoder."""
    folder, images = save(tmp_path / "model", kind), pictures(2)
    reference = Reference(folder, kind)
    job = DecoderJob(spec=CaptionerSpec(llama_dir=folder), out=str(tmp_path / "mindir"), format="mindir")
    run_export_decoder(job)

    with Captioner.load(decoder=tmp_path / "mindir", decoder_backend=backend, batch_size=2) as captioner:
        answers = captioner.generate(images, ["What is it?", "a"], max_new_tokens=64)
        both = captioner.ask(images, "a", max_new_tokens=24)

    for answer, image, question in zip(answers, images, ["What is it?", "a"], strict=True):
        assert list(answer.token_ids) == reference.answer([image], question, max_new_tokens=64)
    assert list(both.token_ids) == reference.answer(images, "a", max_new_tokens=24)
