"""The golden checkpoints in the form that a user gives them, and the reference's answers."""

from pathlib import Path
from typing import Any

from tests.parity.golden import GENERATE, GOLDEN, model_flags, picture
from tests.parity.golden import model_options as model_options

ROOT = Path(__file__).resolve().parents[2]
PICTURES = GOLDEN / "images"
NAMES = ("shapes_200x300.jpg", "noise_128x96.png", "rgba_180x140.png")  # those in the fixture `folder`

CASES = list(GENERATE.values())


def case(name: str) -> dict[str, Any]:
    """The reference's case with this name."""
    return GENERATE[name]


def case_runs(case: dict[str, Any], *, raw: bool = False) -> list[tuple[list[str], list[str]]]:
    """For each prompt of a case: the arguments of the command line, and the texts to be given, in picture order."""
    runs: dict[str, tuple[list[str], list[str]]] = {}
    for image, prompt, text in zip(case["images"], case["prompts"], case["output_text"], strict=True):
        if prompt["text"] not in runs:
            asked = ["--raw-prompt", prompt["text"]] if raw else ["--prompt", prompt["instruction"]]
            if not raw and prompt["input"] is not None:
                asked += ["--input", prompt["input"]]
            arguments = [
                "caption",
                *model_flags(case["adapter"], llama_type=case["llama"]),
                *asked,
                *("--exif", "ignore", "--transparency", "ignore", "--max-new-tokens", str(case["max_gen_len"])),
                *("--context", str(case["max_seq_len"])),
            ]
            runs[prompt["text"]] = (arguments, [])
        runs[prompt["text"]][0].append(picture(image))
        runs[prompt["text"]][1].append(text)
    return list(runs.values())
