"""The golden checkpoints in the form that a user gives them, and the reference's answers."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
PICTURES = GOLDEN / "images"

CASES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))["generate"]


def model_options(adapter: str = "BIAS-TINY", *, llama_type: str = "TINY") -> dict[str, Any]:
    """The arguments of `Captioner.load`."""
    return {
        "llama_dir": str(GOLDEN / "LLaMA"),
        "llama_type": llama_type,
        "adapter": str(GOLDEN / "adapters" / f"{adapter}.pth"),
        "clip": str(GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"),
        "visual_heads": 4,
    }


def model_flags(adapter: str = "BIAS-TINY", *, llama_type: str = "TINY") -> list[str]:
    """The flags of the command line."""
    options = model_options(adapter, llama_type=llama_type)
    return [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]


def picture(name: str = "shapes_200x300.jpg") -> str:
    """The path of a golden picture."""
    return str(PICTURES / name)


def case(name: str) -> dict[str, Any]:
    """The reference's case with this name."""
    return next(case for case in CASES if case["name"] == name)


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
