"""How well a model still answers the questions that it knew before a training."""

from pathlib import Path
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.measuring import scoring
from scripts.train_embedded.score import ALL_TASKS, Exam, answer_all, draw_exam, in_other_words

EXAM_SEED = 22  # for drawings not used elsewhere


def old_scores(bundle: Path, *, num_pictures: int) -> dict[str, dict[str, Any]]:
    """Percent of right answers, by task and for `all`, in known words and in held-out ones, and the number asked."""
    exam = draw_exam(num_pictures=num_pictures, seed=EXAM_SEED)
    with Captioner.load(bundle, device="cpu", dtype="float32") as captioner:
        return {
            "known_words": _shares(captioner, exam),
            "other_words": _shares(captioner, in_other_words(exam, seed=EXAM_SEED)),
        }


def _shares(captioner: Captioner, exam: Exam) -> dict[str, Any]:
    asked = [question for _, question in exam.questions]
    marks = scoring.grade(asked, answer_all(captioner, exam))
    right = {task: 100 * marks[task].right / marks[task].asked for task in ALL_TASKS if task in marks}
    total = sum(mark.right for mark in marks.values())
    return {"asked": len(asked), "all": round(100 * total / len(asked), 2)} | {
        task: round(share, 2) for task, share in right.items()
    }
