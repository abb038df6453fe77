"""Runs of `llama-adapter` on the sets: trainings with their time, and calibrated decisions. Finished ones are kept."""

import json
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from scripts.own_pictures.commands import Figures, remembered, run_command, write_table

UNDECIDED = "undecided"  # the decision of `export-records` below the threshold


def train(learn: Path, out: Path, *, flags: Sequence[str], threads: int) -> Figures:
    """Train the embedded model on a folder of classes. Returns the seconds of the whole command.

    `num_trained` is the number of pictures that were neither validation nor test.
    """

    def measure() -> Figures:
        start = time.perf_counter()
        run_command(["train", str(learn), "--out", str(out), "--force", "--quiet", *flags], threads=threads)
        seconds = round(time.perf_counter() - start, 1)
        data = json.loads((out.with_suffix(".training") / "data.json").read_text(encoding="utf-8"))
        return {"seconds": seconds, "num_trained": data["parts"]["train"]["examples"]}

    return remembered(out.with_suffix(".train.json"), measure)


def decide(bundle: Path, answers: Path, out: Path, *, target: float, seed: int) -> Figures:
    """Calibrate on a random half of the answered pictures, and decide about the other half.

    `answers` are the records of `eval` on folders of classes. Returns the number of pictures of the other half, the
    numbers of decided and of right ones among them, and the `bound`: the share of right ones that the calibration
    promises, with 95 % confidence. Without a threshold for `target` it is None, and nothing counts as decided.
    """

    def measure() -> Figures:
        lines = answers.read_text(encoding="utf-8").splitlines()
        records = sorted(map(json.loads, lines), key=itemgetter("picture"))
        order = np.random.default_rng(seed).permutation(len(records))
        half = len(records) // 2
        known, new = ([records[index] for index in part] for part in (order[:half], order[half:]))
        table, calibration, decisions = (out.with_suffix(f".{kind}") for kind in ("jsonl", "calibration", "decided"))
        write_table(table, [_labelled(record) for record in known])
        choices = json.dumps(list(records[0]["choice"]))
        model = ["--model", str(bundle), "--choices", choices, "--target-precision", str(target)]
        written = ["--calibration-out", str(calibration), "--force", "--quiet"]
        run_command(["ask", "--calibrate", str(table), *model, *written])
        exported = ["--to", "jsonl", "--calibration", str(calibration), "--out", str(decisions), "--force", "--quiet"]
        run_command(["export-records", str(answers), *exported])
        decided = {}
        for line in decisions.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            decided[record["picture"]] = record["decision"]
        promise = json.loads(calibration.read_text(encoding="utf-8"))["promise"]
        texts = {name: decided[name] for name in (one["picture"] for one in new) if decided[name] != UNDECIDED}
        num_right = sum(text == _class_of(name) for name, text in texts.items())
        if promise is None:
            return {"bound": None, "pictures": len(new), "decided": 0, "right": 0}
        return {"bound": promise["bound"], "pictures": len(new), "decided": len(texts), "right": num_right}

    return remembered(out.with_suffix(".json"), measure)


def _labelled(record: Figures) -> Figures:
    """A record's picture and question with the right answer, as a row of a table."""
    name = record["picture"]
    return {"picture": name, "prompt": record["prompt"], "label": _class_of(name)}


def _class_of(picture: str) -> str:
    return Path(picture).parent.name
