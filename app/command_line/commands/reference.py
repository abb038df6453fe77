"""`run-reference`."""

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llama_adapter.app.command_line.model_flags import add_batch_size, add_computation, add_model
from llama_adapter.app.command_line.parser import Parser, command
from llama_adapter.app.command_line.values import settings
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.yaml_file import as_given
from llama_adapter.runtime.terminal.stderr_lines import say

_REFERENCE = """\
Run a program of OpenGVLab/LLaMA-Adapter (llama_adapter_v2_multimodal7b), of the Ascend guide, or of MindFormers'
guides, unchanged: its module `llama` or `mindformers` is replaced by this project's. Flags before SCRIPT.py replace
values that the program sets, such as its paths; arguments after it are passed to the program. Nothing is downloaded.

A command line of MindFormers or PaddleNLP, whose scripts are not in this folder, runs as the command of this program
that it stands for. stderr says how each option was translated (docs/coming-from.md).

  llama-adapter run-reference --llama-dir weights/LLaMA --adapter BIAS-7B.pth --clip ViT-L-14.pt demo.py
  llama-adapter run-reference util/evaluate_mme.py --llama_path weights/LLaMA --pretrained_path LORA-BIAS-7B-v21.pth
  llama-adapter run-reference python predictor.py --model_name_or_path llama2-7b --data_file dev.json
"""


class _Unset:
    """The default of a flag whose value the program chooses."""

    def __repr__(self) -> str:
        return "the program's, else that of `caption`"


_UNSET = _Unset()


def add_reference(commands: Any, *, run: Callable[[Sequence[str]], int]) -> None:
    """Add `run-reference`. `run` runs a command line of this program."""
    text = "run a program of LLaMA-Adapter's repository or of MindFormers, or a command line of another system"
    runs = partial(_run_reference, run)
    command(commands, "run-reference", runs, declare=_declare, help=text, description=_REFERENCE)


def _declare(reference: Parser) -> None:
    add_model(reference)
    compute = reference.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute)
    reference.set_defaults(**{field.name: _UNSET for field in dataclasses.fields(CaptionerSpec)})
    reference.add_argument("script", metavar="SCRIPT.py", help="the program")
    reference.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")


def _run_reference(run: Callable[[Sequence[str]], int], options: argparse.Namespace) -> int:
    from llama_adapter.app.compat import foreign

    given = {one.setting.dest: one.value for one in options.effective if one.value is not _UNSET}
    script, *arguments = words = [options.script, *options.arguments]
    if (imported := foreign.import_line(words)) is not None:
        say(imported.format_report(), end="")
        imported.check()
        tables = imported.settings
        for one in options.effective:
            if one.value is not _UNSET:
                tables.setdefault(one.setting.section, {})[one.setting.key] = one.value
        ours = _command_line(options.parser.root.commands(), tables)
        say(f"runs: llama-adapter {shlex.join(ours)}")
        return run(ours)
    if script in ("python", "python3") and arguments:
        script, *arguments = arguments
    program = {} if "model" in given else {"llama_dir": "of the program", "adapter": "of the program"}
    settings(CaptionerSpec, program | given)  # raises UsageError for flags that exclude each other
    from llama_adapter.app.compat.reference.run import run_program

    return run_program(script, arguments, overrides=given)


def _command_line(commands: Mapping[str, Parser], tables: Mapping[str, Any]) -> list[str]:
    """The command with these settings (section -> key -> value) as words. Raises UsageError for one that it lacks."""
    name: str = tables["command"]
    left = {
        (section, key): value
        for section, table in tables.items()
        if section != "command"
        for key, value in table.items()
    }
    words = name.split()
    for setting in commands[name].settings():
        value = as_given(left.pop((setting.section, setting.key), None), setting.key)
        if value is not None and setting.flags:
            words.append(setting.flags[setting.read(value)])
        elif value is not None:
            words += [f"{setting.shown}={text}" for text in ([value] if isinstance(value, str) else value)]
    for _, key in left:
        raise UsageError(f"`{name}` has no setting named `{key}`", hint=f"see `llama-adapter {name} --help all`")
    return words
