"""Names of published weights on the command line: they become paths before a command runs."""

import argparse
from typing import Final

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say

_FIELDS: Final = {"model", "llama_dir", "adapter", "clip"}
_FROM_CHECKPOINTS: Final = ("train", "export decoder", "export onnx")  # they need weights with nothing merged
_OF_BUNDLES: Final = ("convert", "quantize", "pack")  # their --model is no name of the catalogue
_SERVICES: Final = ("serve", "web")  # nobody answers a question of theirs


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add `--yes` to a command that takes names of weights. It is consent, so it is no setting of files."""
    if _FIELDS & {action.dest for action in parser._actions}:
        text = "fetch weights that are named, without a question"
        parser.add_argument("--yes", action="store_true", help=text)


def locate_names(options: argparse.Namespace) -> None:
    """Put paths in place of the names and addresses of weights among the options; missing weights are fetched.

    A question is asked on a terminal, unless `--yes` was given, and never by a service. Raises the errors of `located`.
    """
    values = dict(vars(options))
    if not any(values.get(field) for field in _FIELDS):
        return
    from llama_adapter.app.models.named.catalogue import find_parts  # help needs none of it
    from llama_adapter.app.models.named.located import is_named, located

    command, name = options.parser.name, str(values.get("model"))
    if command in _OF_BUNDLES and find_parts(name) and is_named(name):
        raise UsageError(
            f"`{command} --model` takes no name of `get --list`, got `{name}`",
            hint="pass a file, a folder or `hf:OWNER/NAME`; `convert --llama-dir NAME --out FOLDER`, for pictures with "
            "--adapter and --clip, makes a bundle",
        )
    found = located(
        values,
        consent="yes" if values.get("yes") else "no" if command in _SERVICES else "ask",
        tell=(lambda line: None) if values.get("quiet") else say,
        from_checkpoints=command in (*_FROM_CHECKPOINTS, *_OF_BUNDLES),
    )
    if "llama_dir" not in values and (folder := found.pop("llama_dir", None)) is not None:
        found["model"] = folder
    for field, value in found.items():
        setattr(options, field, value)
