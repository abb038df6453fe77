"""Values come from flags, the environment, a file and defaults, in this order. Errors name the line or variable."""

import json
import os
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.command_line.main import build_parser, main
from llama_adapter.app.command_line.settings_file import read_settings
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import PREFIX
from llama_adapter.runtime.settings.yaml_file import MAX_CONFIG_BYTES, read_yaml

Parse = Callable[..., Namespace]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def parse() -> Parse:
    """Parses a command line, with a file run.yaml if its text is given."""

    def parse(*words: str, file: str | None = None) -> Namespace:
        if file is not None:
            Path("run.yaml").write_text(file, encoding="utf-8")
            words += ("--config", "run.yaml")
        return build_parser().parse_args(words)

    return parse


def source(options: Namespace, key: str) -> tuple[Any, str]:
    return next((one.value, one.source) for one in options.effective if one.setting.key == key)


@pytest.mark.slow
@pytest.mark.proves("settings from files and the environment", "CPU")
def test_flag_then_variable_then_file_then_default(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "computation:\n  batch_size: 2\n"

    assert source(parse("caption"), "batch_size") == (8, "default")
    assert source(parse("caption", file=file), "batch_size") == (2, "run.yaml:2")
    monkeypatch.setenv("LLAMA_ADAPTER_BATCH_SIZE", "3")
    assert source(parse("caption", file=file), "batch_size") == (3, "LLAMA_ADAPTER_BATCH_SIZE")
    assert source(parse("caption", "--batch-size", "4", file=file), "batch_size") == (4, "--batch-size")


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("computation: {batch_size: auto}", "batch_size", "auto"),
        ("computation: {encoder_process: yes}", "encoder_process", True),
        ("model: {llama_type: 7}", "llama_type", "7"),
        ("model: {channel_order: auto}", "channel_order", "auto"),
        ("prompt: {prompt: no}", "prompt", ["no"]),
        ("generation: {temperature: 1e-3}", "temperature", 0.001),
        ("generation: {seed: null}", "seed", None),
        ("input: {pictures: a.png}", "pictures", ["a.png"]),
        ("input: {pictures: [a.png, b.png]}", "pictures", ["a.png", "b.png"]),
        ("input: {shard: 1/4}", "shard", (1, 4)),
        ("input: {shard: [1, 4]}", "shard", (1, 4)),
        ("output: {overwrite: true}", "overwrite", True),
        ("profiling: {profile: marks}", "profile", "marks"),
    ],
)
def test_a_file_gives_the_value_that_the_flag_would_give(parse: Parse, file: str, key: str, value: object) -> None:
    assert source(parse("caption", file=file), key)[0] == value


def test_choices_in_a_file_are_texts(parse: Parse) -> None:
    for choices in ("[Yes, No]", "Yes,No", "Yes, No"):
        assert parse("ask", file=f"prompt:\n  choices: {choices}").choices == ("Yes", "No")
    for texts in (["yes", "no, it is not"], ["[a]", "b"], ["[a", 'b]"']):
        given = json.dumps(texts)
        assert parse("ask", file=f"prompt:\n  choices: {given}").choices == tuple(texts)
        assert parse("ask", "--choices", given).choices == tuple(texts)


def test_a_flag_replaces_what_a_file_says(parse: Parse) -> None:
    file = (
        "input: {pictures: [a.png], lists: [b.txt], recursive: true}\n"
        "output: {overwrite: true}\nprofiling: {profile: marks}\n"
    )
    flags = ("c.png", "--list", "d.txt", "--list", "e.txt", "--no-recursive", "--resume", "--profile")
    options = parse("caption", *flags, file=file)

    assert (options.paths, options.lists) == (["c.png"], ["d.txt", "e.txt"])
    assert (options.recursive, options.overwrite, options.profile) == (False, False, "wait")


def test_required_settings_may_come_from_a_file(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("quantize", file="output: {out: bundle}").out == "bundle"
    assert main(["quantize"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.txt", ["a.txt"]),
        ('["a.txt", "b.txt"]', ["a.txt", "b.txt"]),
        ("[a].txt", ["[a].txt"]),
        ("", []),
        ("[" * 9999, ["[" * 9999]),
    ],
    ids=["one", "several", "brackets", "empty", "deep"],
)
def test_a_list_in_a_variable(parse: Parse, monkeypatch: pytest.MonkeyPatch, text: str, value: list[str]) -> None:
    monkeypatch.setenv("LLAMA_ADAPTER_LISTS", text)

    assert parse("caption").lists == value


def test_variables_of_other_commands_and_programs_are_left_alone(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOST": "::1", "API_KEY": "x", "VERSION": "3", "PORT_8000_TCP_ADDR": "10.0.0.1"}.items():
        monkeypatch.setenv(PREFIX + name, value)
    monkeypatch.setenv("LLAMA_ADAPTER_PORT", "tcp://10.0.0.1:8000")  # set by Kubernetes for a service with this name

    assert parse("caption").batch_size == 8
    assert (parse("serve").port, parse("serve").host) == (8000, "::1")


def test_a_mistake_in_a_file_is_a_sentence_with_its_line(capsys: pytest.CaptureFixture[str], snapshot: Any) -> None:
    told = []
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines():
        words, _, text = line.partition(" | ")
        Path("run.yaml").write_text("\n# a comment\n" + text + "\n", encoding="utf-8")
        inputs = ["x.jsonl", "--to", "csv"] if "export" in words else ["x.png"]
        assert main([*words.split(), *inputs, "--config", "run.yaml"]) == 2
        told += [line, *(f"    {said}" for said in capsys.readouterr().err.split("\n") if said)]

    assert "\n".join(told) == snapshot


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SEED", "many", "LLAMA_ADAPTER_SEED: wanted a whole number"),
        ("TOP_P", "3", "LLAMA_ADAPTER_TOP_P must lie in 0..1"),
        ("QUIET", "maybe", "LLAMA_ADAPTER_QUIET: wanted true or false"),
        ("BATCHSIZE", "3", "LLAMA_ADAPTER_BATCH_SIZE may be meant"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)

    assert main(["caption", "x.png"]) == 2
    assert told in capsys.readouterr().err


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}, *{before}, *{before}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        BOMB.encode(),
        b"a: &a [*a]",
        b"a: " + b"[" * 2000,
        b"a: 1\n" * MAX_CONFIG_BYTES,
        b"a: 1\na: 2",
        b"a: \xff",
        b"a: \x01",
        b"a: 1\n---\na: 2",
        b"a: !!python/object/apply:os.getcwd []",
    ],
    ids=["aliases", "circle", "deep", "long", "twice", "encoding", "control", "documents", "objects"],
)
def test_hostile_yaml_is_refused(content: bytes) -> None:
    Path("run.yaml").write_bytes(content)

    with pytest.raises(UsageError):
        read_yaml("run.yaml")


@pytest.mark.parametrize("value", ["9" * 5000, "0x" + "f" * 5000, "1" + ":59" * 3000, "2026-13-45"])
def test_a_value_that_cannot_be_read_is_told_with_its_line(value: str) -> None:
    Path("run.yaml").write_text(f"exe_mode: eager\nworld_size: {value}\n", encoding="utf-8")

    with pytest.raises(UsageError, match=r"run\.yaml:2: "):
        read_settings("run.yaml")


@pytest.mark.parametrize("settings", [[1], "text", 5, None])
def test_a_manifest_whose_settings_are_no_table_has_none(settings: object) -> None:
    run = {"run": "a", "spec": {}, "model_digest": "", "versions": {}, "settings": settings}
    content = {"format": "llama-adapter-runs", "version": 1, "runs": [run]}
    Path("x.jsonl.manifest.json").write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(UsageError):
        read_settings("x.jsonl.manifest.json")


def test_a_pipe_has_the_settings_of_another_system() -> None:
    os.mkfifo("pipe")
    text = "exe_mode: eager\nmodel_path: x\n"
    writer = threading.Thread(target=Path("pipe").write_text, args=(text,), daemon=True)
    writer.start()

    found = {entry.key: entry.given for entry in read_settings("pipe").entries}
    writer.join()
    assert found == {"mode": "eager", "model": "x"}


def test_plain_values_and_their_lines() -> None:
    Path("run.yaml").write_text("a: 1\nb: &b\n  c: [true, 2.5, x]\nd: *b\n", encoding="utf-8")
    table = read_yaml("run.yaml")

    assert table == {"a": 1, "b": {"c": [True, 2.5, "x"]}, "d": {"c": [True, 2.5, "x"]}}
    assert (table.lines, table["b"].lines) == ({"a": 1, "b": 2, "d": 4}, {"c": 3})


def test_a_key_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[Any]] = {}
    for name, parser in build_parser().commands().items():
        settings = parser.settings()
        assert len({setting.key for setting in settings}) == len(settings), name
        for setting in settings:
            number = setting.parse if setting.parse in (int, float) else None
            meaning = (setting.section, setting.is_switch, setting.is_list, setting.separator, number)
            meanings.setdefault(setting.key, set()).add(meaning)
    assert {key: found for key, found in meanings.items() if len(found) > 1} == {}
