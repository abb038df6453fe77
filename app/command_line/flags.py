"""Declares commands and their flags, from the tables `commands.json` and `flags.json`.

A part in `flags.json` is a list of groups. A group is a list of flags with the parameters of `Group.add_argument`.
Some parameters refer to Python: `type` names an entry of `_TYPES`, `choices` may name an entry of `_CHOICES`, and
`$name` in a help text stands for a text of `_TEXTS`. `{"use": NAME}` stands for the shared flags of that name. Its
`changed` gives other parameters for some of them, or null for those left out. A flag whose help is null is accepted,
but not shown. `elsewhere` has flags of other programs (MindFormers, PaddleNLP), and ours that mean the same.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from string import Template
from typing import Any, Final, get_args

from llama_adapter.app.captioning.tasks.choose import parse_choices
from llama_adapter.app.command_line import values
from llama_adapter.app.command_line.names import add_yes
from llama_adapter.app.command_line.parser import EXIT_CODES, Group, Parser, add_config, read_table
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S, DEFAULT_READER
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.graphs import defaults as export_defaults
from llama_adapter.runtime.schemes import OPERATORS, PRECISIONS, QUANTISED
from llama_adapter.runtime.terminal.logs import LOG_FORMATS, LOG_LEVELS
from llama_adapter.vision.formats import Damaged, Orientation, Reading, Transparency

DEVICES: Final = "cpu, cuda, cuda:1, npu:0, ... or auto"

_TYPES: Final[Mapping[str, Callable[[str], Any]]] = {
    "int": int,
    "float": float,
    "text": values.parse_text,
    "names": methodcaller("split", ","),
    "choices": values.value_of(parse_choices),
    "band": values.parse_band,
    "shard": values.parse_shard,
    "sample_fields": values.parse_sample_fields,
    "batch_size": values.parse_batch_size,
    "batch_sizes": values.parse_batch_sizes,
    "bytes": values.parse_bytes,
    "encoder_device": values.parse_encoder_device,
    "json_file": values.read_json,
}
_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "exif": get_args(Orientation),
    "transparency": get_args(Transparency),
    "damaged": get_args(Damaged),
    "reading": get_args(Reading),
    "operators": tuple(OPERATORS),
    "precisions": tuple(PRECISIONS),
    "quantised": QUANTISED,
    "dtypes": export_defaults.DTYPES,
    "opsets": export_defaults.OPSETS,
    "decoder_formats": export_defaults.DECODER_FORMATS,
    "decoder_precisions": export_defaults.DECODER_PRECISIONS,
    "log_levels": LOG_LEVELS,
    "log_formats": LOG_FORMATS,
}
_TEXTS: Final = {
    "devices": DEVICES,
    "operator_meanings": "; ".join(f"{name}: {what}" for name, what in OPERATORS.items()),
    "precision_meanings": ", ".join(f"{name} {what}" for name, what in PRECISIONS.items()),
}


def fields_of(*instances: Any) -> dict[str, Any]:
    """The fields of dataclass instances by name. Of several with the same name, the first counts."""
    return {
        field.name: getattr(instance, field.name)
        for instance in reversed(instances)
        for field in dataclasses.fields(instance)
    }


_DEFAULTS: Final = fields_of(CaptionerSpec(), SamplingParams()) | {
    "reader": DEFAULT_READER,
    "picture_timeout_s": DEFAULT_PICTURE_TIMEOUT_S,
}


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    declare: Callable[[Parser], None] | None = None,
    parts: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    **texts: str,
) -> Parser:
    """Add a command; `declare` adds its flags when they are needed.

    Without `declare`, its flags are these `parts` of `flags.json`, by default the one of its name, with `defaults`.
    `texts` are its `help` and `description`; without any, those in `commands.json`.
    """

    def everything(parser: Parser) -> None:
        if declare is None:
            add_flags(parser, *(parts or (name,)), defaults=defaults)
        else:
            declare(parser)
        add_yes(parser)
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if any(getattr(action, "section", None) for action in parser._actions):
            add_config(parser)

    parser = add_parser(commands, name, declare=everything, **texts)
    parser.set_defaults(command=run, prog=parser.prog, parser=parser)
    return parser


def add_parser(commands: Any, name: str, **more: Any) -> Parser:
    """Add the parser of a command such as `export onnx`, or of several commands."""
    if "help" not in more:
        more |= {"help": read_table("commands.json")[name]["help"], "description": description(name)}
    parser: Parser = commands.add_parser(name.rpartition(" ")[2], epilog=EXIT_CODES, **more)
    return parser


def description(name: str) -> str:
    """The description of a command in `commands.json`."""
    return "\n".join([*read_table("commands.json")[name]["description"], ""])


def add_flags(
    parser: Parser, *parts: str, defaults: Mapping[str, Any] | None = None, texts: Mapping[str, str] | None = None
) -> None:
    """Add the flags of parts in `flags.json` to a parser. A group may exist already.

    A flag without a default in the table has that of `defaults`, by `dest`, else that of `CaptionerSpec` or
    `SamplingParams`. `texts` are further texts for `$name`.
    """
    usual, known = {**_DEFAULTS, **(defaults or {})}, {**_TEXTS, **(texts or {})}
    for entry in (entry for part in parts for entry in read_table("flags.json")["parts"][part]):
        group: Any = _group(parser, entry) if "title" in entry else parser
        exclusive = None
        for flag in _flags(entry["flags"], {}):
            place, names = group, flag.pop("flag").split()
            if flag.pop("exclusive", False):
                place = exclusive = exclusive or group.add_mutually_exclusive_group()
            dest = flag.get("dest", names[0].lstrip("-").replace("-", "_"))
            place.add_argument(*names, **_declared(flag, dest, usual, known))


def _flags(entries: list[dict[str, Any]], changed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The flags of a list, with those that it uses, as new tables."""
    for entry in entries:
        if "use" in entry:
            yield from _flags(read_table("flags.json")["shared"][entry["use"]], {**entry.get("changed", {}), **changed})
        elif (change := changed.get(entry["flag"], {})) is not None:
            yield {**entry, **change}


def _declared(flag: dict[str, Any], dest: str, usual: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `add_argument` for a flag of the table."""
    if "default" not in flag and flag.get("action") != "store_true" and "const" not in flag:
        if dest in usual:
            flag["default"] = usual[dest]
        elif flag.get("action") == "append":
            flag["default"] = []
    elif isinstance(flag.get("default"), list):
        flag["default"] = tuple(flag["default"])
    if "type" in flag:
        flag["type"] = _TYPES[flag["type"]]
    if "choices" in flag:
        flag["choices"] = _CHOICES[flag["choices"]] if isinstance(flag["choices"], str) else tuple(flag["choices"])
    flag["help"] = argparse.SUPPRESS if flag["help"] is None else Template(flag["help"]).substitute(texts)
    return flag


def _group(parser: Parser, entry: Mapping[str, Any]) -> Group:
    for group in parser._action_groups:
        if group.title == entry["title"] and isinstance(group, Group):
            return group
    return parser.add_argument_group(entry["title"], entry.get("description"), section=entry.get("section"))
