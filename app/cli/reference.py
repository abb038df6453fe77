"""`run-reference`."""

import argparse
import dataclasses
from typing import Any

from llama_adapter.app.cli.model_flags import add_batch_size, add_computation, add_model
from llama_adapter.app.cli.parser import Parser, command
from llama_adapter.app.cli.values import settings
from llama_adapter.app.models.spec import CaptionerSpec

_REFERENCE = """\
Run a program of OpenGVLab/LLaMA-Adapter (llama_adapter_v2_multimodal7b), of the Ascend guide, or of MindFormers'
guides, unchanged: its module `llama` or `mindformers` is replaced by this project's. Flags before SCRIPT.py replace
values that the program sets, such as its paths; arguments after it are passed to the program. Nothing is downloaded.

  llama-adapter run-reference --llama-dir weights/LLaMA --adapter BIAS-7B.pth --clip ViT-L-14.pt demo.py
  llama-adapter run-reference util/evaluate_mme.py --llama_path weights/LLaMA --pretrained_path LORA-BIAS-7B-v21.pth
"""


class _Unset:
    """The default of a flag whose value the program chooses."""

    def __repr__(self) -> str:
        return "the program's, else that of `caption`"


_UNSET = _Unset()


def add_reference(commands: Any) -> None:
    """Add `run-reference`."""
    text = "run a program of LLaMA-Adapter's repository, or of MindFormers"
    command(commands, "run-reference", _run_reference, declare=_declare, help=text, description=_REFERENCE)


def _declare(reference: Parser) -> None:
    add_model(reference)
    compute = reference.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute)
    reference.set_defaults(**{field.name: _UNSET for field in dataclasses.fields(CaptionerSpec)})
    reference.add_argument("script", metavar="SCRIPT.py", help="the program")
    reference.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")


def _run_reference(options: argparse.Namespace) -> int:
    given = {one.setting.dest: one.value for one in options.effective if one.value is not _UNSET}
    program = {} if "model" in given else {"llama_dir": "of the program", "adapter": "of the program"}
    settings(CaptionerSpec, program | given)  # raises UsageError for flags that exclude each other
    from llama_adapter.app.reference.run import run_program

    return run_program(options.script, options.arguments, overrides=given)
