"""Converts settings of other systems, recognised by their script or keys. Reads YAML, JSON, and command lines."""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from llama_adapter.app.compat.imported import Imported
from llama_adapter.app.compat.importers import (
    PADDLENLP_EXAMPLE,
    ImportSettings,
    import_infer_main,
    import_mindformers,
    import_paddlenlp,
    importer_of,
)
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import SECTIONS
from llama_adapter.runtime.settings.yaml_file import Table, read_content, read_yaml

_Word = tuple[str, int | None, int]  # a word of a command line, its line in a file, and the one that this continues

COMMAND_SUFFIXES = (".sh", ".txt", ".cmd")  # of files with a command line of another system


class _Script(NamedTuple):
    """A program of another system: the importer of its options."""

    import_settings: ImportSettings
    settings_file: str = "config"  # the option that names a YAML
    implied: Mapping[str, Any] = {}  # options that the program's name stands for
    places: Mapping[str, str] = {}  # options and the keys of the YAML that they replace


_SEVERAL = ("predict_data", "modal_type", "adapter_id", "options")  # options with several values
_SHARP = "\ue000"  # stands for # within a word, where it begins no comment
# A script or an option with non-breaking spaces, as pages have them. In a text they belong to it.
_JOINED = re.compile(r"(?!.* )(?:(?:--[\w.-]+|python\S*|\S+\.py)\u00a0|.*\u00a0--[a-z])")
_COPIED = re.compile(r"[—–]+-*[a-zA-Z][\w.-]*(=.*)?|“[^”\s]*|‘[^’\s]*")  # begins with a typographic dash or quote
_OPERATOR = re.compile(r"[;&]+|[|<]\S*|[\d&]?>>?(&\d|[^\s<>]*)")  # of a shell, such as `2>&1`
# Programs and modules that start a program once per device, and their options with the count or the list of these.
_LAUNCHERS = ("torchrun", "msrun", "torch.distributed.run", "torch.distributed.launch", "paddle.distributed.launch")
_NUM_DEVICES, _DEVICES = ("nproc_per_node", "worker_num"), ("gpus", "devices")


class _Bare(str):
    """A word of a file without quotes."""


def _is_operator(word: str) -> bool:
    """Whether a word is a shell's operator. It ends the options of a program."""
    return isinstance(word, _Bare) and _OPERATOR.fullmatch(word) is not None


_PLACES = {name: f"context.{name}" for name in ("mode", "device_target", "device_id")}
# Of the two tables that may have do_sample, generation_config has precedence.
_MINDFORMERS = _Script(import_mindformers, places=_PLACES | {"do_sample": "generation_config.do_sample"})
_SCRIPTS = {
    "run_mindformer.py": _MINDFORMERS,
    "run_mindformers.py": _MINDFORMERS,
    "export.py": _MINDFORMERS._replace(settings_file="config_path", implied={"run_mode": "export"}),
    "run_infer_main.py": _Script(import_infer_main),
    "predictor.py": _Script(import_paddlenlp, implied={"example": PADDLENLP_EXAMPLE}),
    "export_model.py": _Script(import_paddlenlp, implied={"output_path": None}),
}


def import_file(path: str) -> Imported:
    """The settings in a file of another system: YAML, JSON, or a command line in a .txt or .sh file.

    The report lists keys that are not supported. Raises UsageError if the file is not of a known system or cannot be
    read.
    """
    if not path.endswith(COMMAND_SUFFIXES):
        return _import_table(read_yaml(path), source=path)
    name, words = _find_script(_split(read_content(path), source=path), source=path)
    return _import_options(name, words, source=path, folder=Path(path).parent)


def import_line(words: Sequence[str]) -> Imported | None:
    """The settings for a command line of another system, or for that in a .sh file, such as `bash predict.sh`.

    None if it runs no known script, or if its script is a file here, which can be run itself. Raises as `import_file`,
    and UsageError for such a script in a .sh file.
    """
    source, folder = "the command line", Path()
    parts = ([*filter(None, word.split("\u00a0"))] if _JOINED.match(word) else [word] for word in words)
    name, options = _find_script([(word, None, 0) for several in parts for word in several], source=source)
    is_sh = not name and {*words[:-1]} <= {"bash", "sh"} and words[-1].endswith(".sh") and Path(words[-1]).is_file()
    if is_sh:
        source, folder = words[-1], Path(words[-1]).parent
        name, options = _find_script(_split(read_content(source), source=source), source=source)
    if name and not Path(name).exists():
        return _import_options(name, options, source=source, folder=folder)
    if is_sh:
        what = f"`{name}`, which is a file here" if name else "no script of another system"
        raise UsageError(f"`{source}` runs {what}", hint="name the Python program itself: run-reference PROGRAM.py ...")
    return None


def without_launcher(words: Sequence[str]) -> tuple[list[str], Any]:
    """The words of a command line from its program on, and the number of devices if a launcher before it says one."""
    rest, num_devices = _without_launcher([(word, None, 0) for word in words], source="the command line")
    return [word for word, *_ in rest], _typed(num_devices[1][0]) if num_devices else None


def _import_table(data: Table, *, source: str) -> Imported:
    import_settings = importer_of(data)
    if import_settings is None:
        if data and data.keys() <= {"command", *SECTIONS}:
            raise UsageError(f"`{source}` has our own settings already", hint=f"pass it as `--config {source}`")
        what = f"the settings of no known system: its keys are {', '.join(map(str, data))}" if data else "no settings"
        raise UsageError(
            f"`{source}` has {what}",
            hint="known are ModelRunner's YAML, PaddleNLP's predictor options, and MindFormers' YAML",
        )
    return import_settings(data)


def _split(text: str, *, source: str, first: int | None = 1) -> list[_Word]:
    """The words of a command line, which may have several lines. `first` is the number of the first.

    If `>` begins a line with an option, or two lines, it is a prompt, and the same before other lines. The `>` of
    `   > log.txt` then has another indentation.
    """
    if prompt := re.search(r"(?m)^([ \t]*>)(?=[ \t]+--|[ \t].*\\[^\S\n]*\n\1[ \t])", text):
        text = re.sub(rf"(?m)^{prompt[1]}[ \t]", "", text)
    whole = f"{text}\n"
    text = re.sub(r"\\([^\S\n]*(?:#.*)?\n)", r" \1", re.sub(r"(?<=\S)#", _SHARP, whole))
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.whitespace += "\u00a0"
    words: list[_Word] = []
    while True:
        begin = stream.tell()
        try:
            word = lexer.get_token()
        except ValueError as error:
            place = _place(source, None if first is None else first + text.count("\n", 0, begin))
            raise UsageError(f"{place}: this is no command line: {error}") from None
        if word is None:
            return words
        word = word.replace(_SHARP, "#")
        num_before = text.count("\n", 0, stream.tell() - 1) - word.count("\n")
        begun = num_before - len(re.findall(r"\\[^\S\n]*(?:#.*)?\n", whole[: stream.tell() - 1]))
        if text[stream.tell() - 2] not in "\"'":
            word = _Bare(word)
        words.append((word, None if first is None else first + num_before, begun))


def _place(source: str, number: int | None) -> str:
    return source if number is None else f"{source}:{number}"


def _without_launcher(words: list[_Word], *, source: str) -> tuple[list[_Word], list[_Word]]:
    """A line from its program on, and the launcher's number of devices as `--worker_num`."""
    start = next((place for place, (word, *_) in enumerate(words) if word.endswith(".py")), len(words))
    for place, (word, number, begun) in enumerate(words[:start]):
        if Path(word).name in _LAUNCHERS and start < len(words):
            given = [one for one, *_ in words[place + 1 : start]]
            pairs = [(*one.partition("=")[::2], after) for one, after in zip(given, [*given[1:], ""], strict=True)]
            found = {name.lstrip("-").replace("-", "_"): value or after for name, value, after in pairs if "--" in name}
            sizes = [found[name] for name in _NUM_DEVICES if name in found]
            sizes += [str(len(found[name].split(","))) for name in _DEVICES if name in found]
            return words[start:], [(one, number, begun) for one in ("--worker_num", *sizes[:1])] if sizes else []
    return words, []


def _find_script(words: list[_Word], *, source: str) -> tuple[str, list[_Word]]:
    """The known script that a line runs, "" if it runs none, and the words after it.

    A launcher may be before it, or around it, as a quoted line; the number of devices becomes `--worker_num`.
    """
    words, num_devices = _without_launcher(words, source=source)
    for place, (word, number, _) in enumerate(words):
        if word.startswith("--"):
            break
        after = words[place + 1 :]
        if Path(word).name in _SCRIPTS:
            return word, [*num_devices, *after]
        if ".py" in word and len(word.split()) > 1:
            name, options = _find_script(_split(word, source=source, first=number), source=source)
            if name:
                rest = [one for one in after if one[2] == after[0][2]]  # a number of devices, a port, a folder
                rest = [*takewhile(lambda one: not _is_operator(one[0]), rest)]
                if outside := next((one for one in rest if one[0].startswith("--")), None):
                    what = f"{_place(source, outside[1])}: `{outside[0]}` follows the quoted line of a program"
                    raise UsageError(what, hint="write the options of the program inside of the quotes")
                num_devices = rest[:1]
                return name, [*options, *(("--worker_num", *one[1:]) for one in num_devices), *num_devices]
    return "", words


def _import_options(name: str, words: list[_Word], *, source: str, folder: Path) -> Imported:
    """The settings for the options of a script; of an unknown one, the options tell the system.

    As in MindFormers, options of the command line override those of `--config FILE`, which may be in `folder`.
    """
    script = _SCRIPTS.get(Path(name).name, _Script(partial(_import_table, source=source)))
    options = _read_options(words, source=source)
    if name and not options:
        hint = "name the file of settings that was changed: --config FILE.yaml"
        raise UsageError(f"{source}: `{name}` has no options, and this program does not know its defaults", hint=hint)
    if name and isinstance(model := options.pop("model_dir", None), str):
        files = sorted(map(str, Path(model).glob("*.y*ml")))
        if len(files) != 1:
            raise UsageError(
                f"{source}: `{model}` has {len(files)} YAML files",
                hint="--model_dir is a folder with one YAML, one .ckpt and a tokenizer.model",
            )
        options[script.settings_file], options["load_checkpoint"] = files[0], model
    for key, value in script.implied.items():
        options.setdefault(key, value)
    if script is _MINDFORMERS and isinstance(texts := options.get("predict_data"), list) and len(texts) == 1:
        options["predict_data"] = texts[0].replace(r"\n", "\n")  # as run_mindformer.py does
    config = options.get(script.settings_file)
    if isinstance(config, str):
        del options[script.settings_file]
    options = _nested(options, script.places, source=source)
    if isinstance(config, str):
        _add(options, read_yaml(str(beside if (beside := folder / config).exists() else Path(config))))
    return script.import_settings(options)


def _nested(options: Table, places: Mapping[str, str], *, source: str) -> Table:
    """Options in tables, such as `--mode 1`, `--context.mode 1` and `--options context.mode=1`.

    Raises UsageError for a pair without `=`.
    """
    nested = Table()
    line = options.lines.get("options")
    pairs = options.pop("options", [])
    given = [(places.get(name, name), value, options.lines.get(name)) for name, value in options.items()]
    for pair in pairs if isinstance(pairs, list) else [""]:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"{_place(source, line)}: `--options` is followed by KEY=VALUE, got `{pair}`")
        given.append((name, _typed(value), line))
    for path, value, number in given:
        table, (*parents, last) = nested, path.split(".")
        for parent in parents:
            if not isinstance(table.get(parent), Table):
                table[parent] = Table()
            table = table[parent]
        table[last] = value
        if number is not None:
            table.lines[last] = number
    return nested


def _add(options: Table, table: Table) -> None:
    """Add the keys of a YAML that no option replaces."""
    options.source = table.source
    for key, value in table.items():
        if isinstance(value, Table) and isinstance(own := options.get(key), Table):
            _add(own, value)
        elif key not in options:
            options[key] = value
            options.lines[key] = table.lines[key]


def _read_options(words: list[_Word], *, source: str) -> Table:
    """The options of a command line, as a table with line numbers. Raises UsageError with the line."""
    options = Table()
    name: str | None = None
    line = 0
    for word, number, begun in words:
        if options and _is_operator(word):
            break
        if name in _SEVERAL and isinstance(options[name], list) and begun > line:
            name = None
        line = begun + word.count("\n")
        place = _place(source, number)
        if isinstance(word, _Bare) and _COPIED.fullmatch(word):
            raise UsageError(f"{place}: `{word}` begins with a typographic dash or quote", hint="write -- or '")
        word = str(word)
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if not re.fullmatch(r"[\w.]+", name):
                hint = "write plain spaces, and -- before a name of letters, digits and _"
                raise UsageError(f"{place}: `{word}` is no option", hint=hint)
            if name in options:
                first = f", first in line {options.lines[name]}" if name in options.lines else ""
                raise UsageError(f"{place}: `--{name}` is given twice{first}")
            options[name] = ([value] if name in _SEVERAL else _typed(value)) if equals else True
            if number is not None:
                options.lines[name] = number
            name = None if equals else name
        elif name in _SEVERAL:
            options[name] = [*(options[name] if isinstance(options[name], list) else ()), word]
        elif name is not None:
            options[name], name = _typed(word), None
        elif options:
            raise UsageError(f"{place}: `{word}` belongs to no option")
    return options


def _typed(text: str) -> Any:
    """The value of a word, converted as in the parsers of the other systems."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
