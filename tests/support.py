"""The page docs/support.md: what is supported on which device, collected from the tests that prove it.

A test states what it proves: `@pytest.mark.proves("int8", "cpu")`, a feature of `FEATURES` and at least one of
`COLUMNS`. Usage: python -m tests.support
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "support.md"
MARK = "pytest.mark.proves"

# Columns, and what a passing test shows: `RUN`, it ran on the real device or program; `CONTRACT`, on a stand-in.
RUN, CONTRACT = "run", "contract"
COLUMNS = {"CPU": RUN, "CUDA": CONTRACT, "NPU": CONTRACT, "ONNX": RUN, "OM": CONTRACT, "MindSpore": RUN}
ON_HARDWARE = "tests/cuda/"  # the tests in it show `RUN` in every column

# Features that do not exist on a device.
WITHOUT = {
    ("graphs", "CPU"),
    ("asynchronous read-back", "CPU"),
    ("several batch sizes", "CPU"),
    ("execution providers", "CPU"),
    ("execution providers", "OM"),
    ("execution providers", "MindSpore"),
    *(
        (feature, runs)
        for feature in ("graphs", "asynchronous read-back", "traces", "tensor parallelism")
        for runs in ("ONNX", "OM", "MindSpore")
    ),
}

# Sections of the page, their features, and the columns that apply to them.
EVERYWHERE, DECODER, ENCODER, HOST = tuple(COLUMNS), tuple(COLUMNS), ("CPU", "ONNX", "OM", "MindSpore"), ("CPU",)
FEATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Models": (
        EVERYWHERE,
        (
            "embedded model",
            "bundles",
            "Meta LLaMA and adapter",
            "Hugging Face LLaMA",
            "BIAS adapters",
            "LORA adapters",
            "CAPTION adapters (one query)",
            "adapters with CLIP inside",
            "LLaMA without adapter",
            "LLaMA-Adapter V1 for texts",
            "LLaMA-Adapter V2 for chat",
            "Meta's 2, 4 and 8 files",
            "prefix tuning",
            "LoRA of PEFT",
        ),
    ),
    "Numbers": (EVERYWHERE, ("float32", "bfloat16", "float16", "int8 weights", "int4 weights")),
    "Decoder": (
        DECODER,
        (
            "token ids of the reference",
            "continuous batching",
            "fused operators or kernels",
            "graphs",
            "asynchronous read-back",
            "choices by scoring",
            "text without a picture",
            "repetition penalty",
            "streaming",
            "fewer rows when memory is short",
            "traces",
            "tensor parallelism",
        ),
    ),
    "Encoder": (
        ENCODER,
        (
            "visual query of the reference",
            "any number of pictures",
            "several batch sizes",
            "execution providers",
            "prefix files",
            "doctor",
        ),
    ),
    "Programs": (
        HOST,
        (
            "caption, ask: resume after kill -9",
            "generate: resume after kill -9",
            "encode: resume after kill -9",
            "demo_bsz.py",
            "settings from files and the environment",
            "pipeline, InferTask",
            "ModelRunner",
            "settings of other systems",
            "serve: OpenAI's API",
            "serve: batch files",
            "serve: replicas",
            "web: chat and batches",
            "run-reference",
            "calibration of choices",
            "training",
            "train: resume after kill -9",
            "train: several ranks",
            "train: early stopping",
            "train: memory plan",
            "train: TensorBoard",
            "train: tables of parts",
            "eval",
            "Ray clusters",
            "exports",
        ),
    ),
}


class Proof(NamedTuple):
    """A test, and the feature and columns that it proves."""

    test: str  # tests/...py::name
    feature: str
    columns: tuple[str, ...]


def proofs(folder: Path = ROOT / "tests") -> Iterator[Proof]:
    """The proofs stated by the decorators of all tests."""
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if MARK not in text:
            continue
        for node in ast.parse(text).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == MARK:
                    feature, *columns = (ast.literal_eval(argument) for argument in call.args)
                    yield Proof(f"{path.relative_to(folder.parent).as_posix()}::{node.name}", feature, tuple(columns))


def page(found: Iterator[Proof]) -> str:
    """The page in Markdown. Raises ValueError for a proof of an unknown feature or column."""
    tests: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = {feature: columns for columns, features in FEATURES.values() for feature in features}
    for proof in found:
        if not proof.columns or not set(proof.columns) <= set(known.get(proof.feature, ())):
            raise ValueError(f"{proof.test} proves `{proof.feature}` for {proof.columns}, which is no cell of the page")
        for column in proof.columns:
            tests[proof.feature, column].append(proof.test)
    lines = [
        "# Supported features by device",
        "",
        "Generated by `python -m tests.support` from markers of the tests. A test checks that it is up to date.",
        "",
        "- *run*: tests run the feature on the device, or with the real program. CUDA: on an H100, by `make cuda`.",
        "- *contract*: tests run the feature without the device. CUDA: streams and graphs simulated on the CPU. NPU:",
        "  the real torch_npu wheel on a simulated CANN. Ranks on both: sums on the host, between two processes. OM:",
        "  simulated `atc` and ais_bench.",
        "- *not run*: the feature is not disabled, but no test runs it.",
        "- *none*: the device neither has nor needs the feature.",
        "",
        "[Devices](devices.md) has the details and the measurements.",
    ]
    for title, (columns, features) in FEATURES.items():
        lines += ["", f"## {title}", "", f"| | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
        for feature in features:
            absent = {column: "none" if (feature, column) in WITHOUT else "not run" for column in columns}
            cells = (shown(column, tests[feature, column]) or absent[column] for column in columns)
            lines.append(f"| {feature} | {' | '.join(cells)} |")
    lines += ["", "## Tests", ""]
    for feature in known:
        named = dict.fromkeys(test for column in COLUMNS for test in tests[feature, column])
        lines += [f"- {feature}", *(f"  - `{test}`" for test in named)]
    return "\n".join(lines) + "\n"


def shown(column: str, tests: list[str]) -> str:
    """What these tests of a feature show for a column; empty without tests."""
    return RUN if any(test.startswith(ON_HARDWARE) for test in tests) else COLUMNS[column] if tests else ""


if __name__ == "__main__":
    PAGE.write_text(page(proofs()), encoding="utf-8")
