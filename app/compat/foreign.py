"""Converts settings of other systems, recognised by their script or keys. Reads YAML, JSON, and command lines."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from llama_adapter.app.compat.command_words import Word, check_copied, place, split_words
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

COMMAND_SUFFIXES = (".sh", ".txt", ".cmd")  # of files with a command line of another system


class _Script(NamedTuple):
    """A program of another system: the importer of its options."""

    import_settings: ImportSettings
    settings_file: str = "config"  # the option that names a YAML
    implied: Mapping[str, Any] = {}  # options that the program's name stands for
    places: Mapping[str, str] = {}  # options and the keys of the YAML that they replace


_AFTER = ("fi", "done", "wait", "echo", "exit", "}")  # words of a shell that may begin the line after the command
_SEVERAL = ("predict_data", "modal_type", "adapter_id", "options")  # options with several values
# Programs and modules that start a program once per device, and their options with the count or the list of these.
_LAUNCHERS = ("torchrun", "msrun", "torch.distributed.run", "torch.distributed.launch", "paddle.distributed.launch")
_NUM_DEVICES, _DEVICES = ("nproc_per_node", "worker_num"), ("gpus", "devices")

# Of the two tables that may have do_sample, generation_config has precedence.
_MINDFORMERS = _Script(
    import_mindformers,
    places={name: f"context.{name}" for name in ("mode", "device_target", "device_id")}
    | {"do_sample": "generation_config.do_sample"},
)
_SCRIPTS = {
    "run_mindformer.py": _MINDFORMERS,
    "run_mindformers.py": _MINDFORMERS,
    "export.py": _MINDFORMERS._replace(settings_file="config_path", implied={"run_mode": "export"}),
    "run_infer_main.py": _Script(import_infer_main),
    "predictor.py": _Script(import_paddlenlp, implied={"example": PADDLENLP_EXAMPLE}),
    "export_model.py": _Script(import_paddlenlp, implied={"output_path": None}),
}

PROGRAMS = f"name a Python file, or a line of {', '.join(_SCRIPTS)}"  # a hint


def import_file(path: str) -> Imported:
    """The settings in a file of another system: YAML, JSON, or a command line in a .txt or .sh file.

    The report lists keys that are not supported. Raises UsageError if the file is not of a known system or cannot be
    read.
    """
    if not path.endswith(COMMAND_SUFFIXES):
        return _import_table(read_yaml(path), source=path)
    name, words = _find_script(split_words(read_content(path), source=path), source=path)
    return _import_options(name, words, source=path, folder=Path(path).parent)


def import_line(words: Sequence[str]) -> Imported | None:
    """The settings for a command line of another system, or for that in a .sh file, such as `bash predict.sh`.

    None if it runs no known script, or if its script is a file here, which can be run itself. Raises as `import_file`,
    and UsageError for such a script in a .sh file.
    """
    source, folder = "the command line", Path()
    name, options = _find_script([*map(Word, words)], source=source)
    shell = re.compile(r"(.*/)?(ba)?sh|\.|source|-[^\Wc]+|--login|pipefail")  # and its switches, such as -x, but not -c
    file, *given = [*dropwhile(shell.fullmatch, words)] or [""]
    is_sh = not name and file.endswith(".sh")
    if is_sh:
        source, folder = file, Path(file).parent
        name, options = _find_script(split_words(read_content(source, hint=PROGRAMS), source=source), source=source)
    if name and not Path(name).exists() and not (is_sh and given):
        return _import_options(name, options, source=source, folder=folder)
    if is_sh:
        if not name:
            message = f"`{source}` runs no script of another system"
        elif given:
            message = f"`{source}`: arguments after a .sh file are not passed on"
        else:
            message = f"`{source}` runs `{name}`, which is a file here"
        raise UsageError(message, hint="name the Python program itself: run-reference PROGRAM.py ...")
    return None


def without_launcher(words: Sequence[str]) -> tuple[list[str], Any]:
    """The words of a command line from its program on, and the number of devices if a launcher before it says one."""
    rest, num_devices = _without_launcher([*map(Word, words)])
    return [word.text for word in rest], _typed(num_devices[1].text) if num_devices else None


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


def _without_launcher(words: list[Word]) -> tuple[list[Word], list[Word]]:
    """A line from its program on, and the launcher's number of devices as `--worker_num`."""
    start = next((index for index, word in enumerate(words) if word.text.endswith(".py")), len(words))
    for index, word in enumerate(words[:start]):
        if Path(word.text).name in _LAUNCHERS and start < len(words):
            given = [one.text for one in words[index + 1 : start]]
            pairs = [(*one.partition("=")[::2], after) for one, after in zip(given, [*given[1:], ""], strict=True)]
            found = {name.lstrip("-").replace("-", "_"): value or after for name, value, after in pairs if "--" in name}
            sizes = [found[name] for name in _NUM_DEVICES if name in found]
            sizes += [str(len(found[name].split(","))) for name in _DEVICES if name in found]
            return words[start:], [Word(one, word.line) for one in ("--worker_num", *sizes[:1])] if sizes else []
    return words, []


def _find_script(words: list[Word], *, source: str) -> tuple[str, list[Word]]:
    """The known script that a line runs, "" if it runs none, and its options.

    A launcher may be before it, or around it, as a quoted line; the number of devices becomes `--worker_num`.
    """
    words, num_devices = _without_launcher(words)
    for index, word in enumerate(words):
        if word.text.startswith("--"):
            break
        after = words[index + 1 :]
        if Path(word.text).name in _SCRIPTS:
            return word.text, [*num_devices, *after]
        if word.line is None and any(f"{script}\u00a0--" in word.text for script in _SCRIPTS):
            raise UsageError(f"{source}: `{word.text}` has non-breaking spaces", hint="write plain spaces")
        around = index > 0 and re.fullmatch(r".*\.sh|-\w*c", words[index - 1].text)
        if around and any(Path(one).name in _SCRIPTS for one in word.text.split()):
            name, options = _find_script(split_words(word.text, source=source, line=word.line), source=source)
            if name:
                rest = [*takewhile(lambda one: not re.search(r"[;&|\n]", one.gap), after)]  # a number, a port, a folder
                if outside := next((one for one in rest if one.text.startswith("--")), None):
                    what = f"{place(source, outside.line)}: `{outside.text}` follows the quoted line of a program"
                    raise UsageError(what, hint="write the options of the program inside of the quotes")
                num_devices = [part for one in rest[:1] for part in (one._replace(text="--worker_num"), one)]
                return name, [*num_devices, *options]
    return "", [*num_devices, *dropwhile(lambda one: not one.text.startswith(("--", "—", "–")), words)]


def _import_options(name: str, words: list[Word], *, source: str, folder: Path) -> Imported:
    """The settings for the options of a script; of an unknown one, the options tell the system.

    As in MindFormers, options of the command line override those of `--config FILE`, which may be in `folder`.
    """
    script = _SCRIPTS.get(Path(name).name, _Script(partial(_import_table, source=source)))
    options = _read_options(words, script.places, source=source)
    if name and options.keys() <= {"worker_num"}:
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
    if isinstance(config := options.get(script.settings_file), str):
        del options[script.settings_file]
        path = str(beside if (beside := folder / config).exists() else Path(config))
        _add(options, read_yaml(path), path=path)
    return script.import_settings(options)


def _add(options: Table, table: Table, *, path: str) -> None:
    """Add the keys of the YAML `path` that no option replaces."""
    options.source = path
    for key, value in table.items():
        if key not in options:
            options[key] = Table() if isinstance(value, Table) else value
            options.lines[key], options.files[key] = table.lines[key], path
        if isinstance(value, Table) and isinstance(own := options[key], Table):
            _add(own, value, path=path)


def _read_options(words: list[Word], places: Mapping[str, str], *, source: str) -> Table:
    """The options of a command line in tables, such as `--mode 1`, `--context.mode 1` and `--options context.mode=1`.

    Raises UsageError with the line.
    """
    options = Table()
    table, name = options, ""  # the option that a value may follow
    for word in words:
        text, line, gap, bare = word
        if gap != "&" and (re.search("[;&|]", gap) or ("\n" in gap and bare in _AFTER)):
            break
        check_copied(word, source)
        several = isinstance(table.get(name), list)
        if gap == "&" or ("\n" in gap and not text.startswith("--")):
            hint = r"leave it out, or add `\` at the end of the line before; write quotes around a text with `&`"
            raise UsageError(f"{place(source, line)}: `{text}` begins a new command", hint=hint)
        if several and table[name] and {*gap} == {"\u00a0"} and not (bare or "").startswith('"'):
            what = f"{place(source, line)}: a non-breaking space is before `{text}`"
            raise UsageError(what, hint="write a plain space, or quotes around a text that contains it")
        if text.startswith("--"):
            name, equals, value = text.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if not re.fullmatch(r"[\w.]+", name):
                hint = "write plain spaces, and -- before a name of letters, digits and _"
                raise UsageError(f"{place(source, line)}: `{text}` is no option", hint=hint)
            given: Any = value if equals else True
            if name in _SEVERAL:
                given = [value] if equals else []
            table, name = _put(options, places.get(name, name), given, line, source=source)
            name = "" if equals else name
        elif several:
            table[name].append(text)
        elif name:
            table[name], name = _typed(text), ""
        else:
            raise UsageError(f"{place(source, line)}: `{text}` belongs to no option")
    if "options" in options:
        line = options.lines.get("options")
        for pair in options.pop("options") or [""]:
            name, equals, value = pair.partition("=")
            if not name or not equals:
                raise UsageError(f"{place(source, line)}: `--options` is followed by KEY=VALUE, got `{pair}`")
            _put(options, name, value, line, source=source)
    return options


def _put(options: Table, path: str, value: Any, line: int | None, *, source: str) -> tuple[Table, str]:
    """Add an option. Returns its table and its key there. Raises UsageError if it is given already."""
    table: Any = options
    *parents, key = path.split(".")
    for parent in parents:
        table = table.setdefault(parent, Table()) if isinstance(table, Table) else None
    if not isinstance(table, Table) or key in table:
        first = getattr(table, "lines", {}).get(key)
        raise UsageError(
            f"{place(source, line)}: `{path}` is given twice" + (f", first in line {first}" if first else "")
        )
    table[key] = _typed(value) if isinstance(value, str) else value
    if line is not None:
        table.lines[key] = line
    return table, key


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
