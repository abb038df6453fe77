"""Pictures as tokens: our engine and transformers are measured with the same model, which must answer the same."""

import json
from dataclasses import replace
from pathlib import Path

from scripts.peers.child import answer
from scripts.peers.sizes import NUM_ANSWER_TOKENS, NUM_SIGHT_PICTURES
from scripts.peers.table import Task, chosen_engines

OURS, HUGGING_FACE = (chosen_engines([name], "sight")[0] for name in ("ours-float32", "hf-float32"))


def test_both_programs_give_the_same_ids_or_the_second_fails(tmp_path: Path) -> None:
    rungs = (("sight", NUM_SIGHT_PICTURES),)
    task = Task(engine=OURS, size="sight-tiny", work=str(tmp_path), threads=1, rungs=rungs, num_rows=NUM_SIGHT_PICTURES)

    for engine in (OURS, HUGGING_FACE):
        reply = answer(replace(task, engine=engine))
        assert reply.problem == "", reply.reason
        parts = ["sight", "sight-encoder", "sight-prefill", "sight-decode"]
        assert [figure.part for figure in reply.figures] == parts
        assert all(figure.rate > 0 for figure in reply.figures)

    file = tmp_path / "sight-tiny" / "ids-float32.json"
    ids = json.loads(file.read_text())
    assert [len(one) for one in ids] == [NUM_ANSWER_TOKENS] * NUM_SIGHT_PICTURES
    assert len(set(map(tuple, ids))) == NUM_SIGHT_PICTURES  # the pictures or the questions matter
    file.write_text(json.dumps(ids[::-1]))
    assert "differ" in answer(replace(task, engine=HUGGING_FACE)).reason
