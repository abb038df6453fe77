"""Answers of a decoder on several ranks, compared with the reference, with one rank, and alone with in a batch."""

# R rows, V vocabulary

import itertools
import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.runners.base import DecodePlan, PrefillPlan, Tokens
from llama_adapter.llm.runners.kernels import KernelRunner
from scripts.common import ROOT, sample_files

GOLDEN = ROOT / "tests" / "golden"
PROMPTS = ("Generate caption of this image", "What is this?", "Is there a red star in this picture?")
NUM_STEPS = 8  # per answer of the embedded model
MOST_ROWS = 6


class Answer(NamedTuple):
    """The tokens of a row, and the logits from which each token was chosen."""

    token_ids: list[int]
    logits: list[Tensor]  # (V) each


def golden_cases() -> list[dict[str, Any]]:
    """The test cases of the reference."""
    cases: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))["generate"]
    return cases


def golden_answers(cases: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Count answers equal to the reference's tokens, and find the largest difference of a logit.

    Runs in a fresh process.
    """

    def model_of(case: dict[str, Any]) -> tuple[str, str]:
        return case["adapter"], case["llama"]

    num_equal, difference, num_answers = 0, 0.0, 0
    for (adapter, llama), same in itertools.groupby(sorted(cases, key=model_of), key=model_of):
        spec = CaptionerSpec(
            llama_dir=str(GOLDEN / "LLaMA"),
            llama_type=llama,
            adapter=str(GOLDEN / "adapters" / f"{adapter}.pth"),
            clip=str(GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"),
            visual_heads=4,
            batch_size=1,
            dtype="float32",
            tensor_parallel=ranks,
        )
        with closing(assemble_parts(spec)) as parts:
            for case in same:
                logits = load_file(GOLDEN / case["file"]).get("logits")  # None if the case generates no token
                for row, wanted in enumerate(case["output_ids"]):
                    prompt = tuple(case["prompts"][row]["ids"])
                    prefixes = parts.runner.project_prefix(parts.vision.encode(_pixels(case["images"][row])[None]))
                    [ours] = _answers(parts.runner, [prompt], prefixes, num_steps=len(wanted))
                    first = len(prompt) - case["first_chunk_len"]
                    theirs = () if logits is None else logits[row, first : first + len(wanted)]
                    pairs = zip(ours.logits, theirs, strict=True)
                    difference = max([difference, *(float((one - other).abs().max()) for one, other in pairs)])
                    num_equal += ours.token_ids == wanted
                    num_answers += 1
    return {"num_answers": num_answers, "num_equal": num_equal, "difference": difference}


def embedded_answers(num_pictures: int | None, ranks: int) -> dict[str, Any]:
    """Logits (pictures, steps, V) of the embedded model for samples, one at a time, and the largest change in a batch.

    Runs in a fresh process.
    """
    files = sample_files()[:num_pictures]
    parts = assemble_parts(CaptionerSpec(batch_size=MOST_ROWS, dtype="float32", tensor_parallel=ranks))
    with Captioner(parts) as captioner:
        prompts = [
            tuple(captioner.encode_prompt(prompt).token_ids) for prompt, _ in zip(itertools.cycle(PROMPTS), files)
        ]
        contents: list[Any] = [captioner.reader.read(str(file)).content for file in files]
        pixels = np.stack(contents)
        prefixes = parts.runner.project_prefix(parts.vision.encode(pixels))

        def answers(num_rows: int) -> list[Answer]:
            found = []
            for first in range(0, len(files), num_rows):
                rows = slice(first, first + num_rows)
                found += _answers(parts.runner, prompts[rows], prefixes[rows], num_steps=NUM_STEPS)
            return found

        alone, together = answers(1), answers(MOST_ROWS)
    return {
        "token_ids": [one.token_ids for one in alone],
        "logits": _logits(alone),
        "batch_difference": float(np.abs(_logits(alone) - _logits(together)).max()),
    }


def _logits(answers: Sequence[Answer]) -> np.ndarray:
    return np.stack([torch.stack(answer.logits).numpy() for answer in answers])


def _pixels(name: str) -> np.ndarray:
    return np.asarray(Image.open(GOLDEN / "preprocessed" / f"{name.rpartition('.')[0]}.png").convert("RGB"))


def _answers(
    runner: Any, prompts: Sequence[tuple[int, ...]], prefixes: Sequence[Any], *, num_steps: int
) -> list[Answer]:
    """Greedy answers of `num_steps` tokens, in slots from 0 on."""
    rows = range(len(prompts))
    answers = [Answer([], []) for _ in rows]
    draws = [None] * len(prompts)
    for step in range(num_steps):
        plan: Any = PrefillPlan(rows=rows, prompts=prompts, prefixes=prefixes, draws=draws, first_slot=0)
        if step:
            positions = [len(prompt) + step - 1 for prompt in prompts]
            plan = DecodePlan(rows=rows, positions=positions, draws=draws)
        result, logits_RV = _run(runner, plan)
        for row in rows:
            answers[row].token_ids.append(result.token_ids[row])
            answers[row].logits.append(logits_RV[row])
    return answers


def _run(runner: Any, plan: Any) -> tuple[Tokens, Tensor]:
    """Run a step; returns its tokens and the logits of the first rank, which has all of them."""
    own = getattr(runner, "_runner", runner)  # of the first rank, if there are several
    name = "prefill" if isinstance(plan, PrefillPlan) else "decode"
    name = "predict" if isinstance(own, KernelRunner) else name
    compute, kept = getattr(own, name), []

    def recorded(*arguments: Any, **options: Any) -> Any:
        kept.append(compute(*arguments, **options))
        return kept[-1]

    setattr(own, name, recorded)
    try:
        result = runner.run(plan)
    finally:
        delattr(own, name)
    return result, torch.as_tensor(kept[0].logits_RV).clone()
