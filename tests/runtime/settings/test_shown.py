"""Settings written as a file, and the JSON schema of such files."""

import functools
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.command_line.main import build_parser, load_settings
from llama_adapter.app.command_line.settings_file import read_settings
from llama_adapter.runtime.settings.shown import format_settings, json_schema


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_is_read_back_from_a_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "run.yaml"
    file.write_bytes(format_settings({"command": "caption", "prompt": {"prompt": text}}).encode())

    found = read_settings(str(file))
    assert (found.command, [entry.given for entry in found.entries]) == ("caption", [text])
    assert yaml.safe_load(file.read_bytes()) == {"command": "caption", "prompt": {"prompt": text}}


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema. Tests must not change it."""
    found = {name: parser.settings() for name, parser in build_parser().commands().items()}
    return json_schema({name: listed for name, listed in found.items() if listed})


@pytest.mark.parametrize(
    ("is_valid", "content"), yaml.safe_load(Path(__file__).with_name("schema_cases.yaml").read_text(encoding="utf-8"))
)
def test_the_schema_tells_what_is_wrong(is_valid: bool, content: object) -> None:
    assert jsonschema.Draft202012Validator(schema()).is_valid(content) == is_valid


@pytest.mark.parametrize("command", [name for name, parser in build_parser().commands().items() if parser.settings()])
def test_a_file_of_defaults_is_valid_and_has_the_defaults(command: str, tmp_path: Path) -> None:
    usual, file = load_settings(command=command), tmp_path / "run.yaml"
    file.write_text(usual.to_yaml(), encoding="utf-8")

    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    if command != "run-reference":  # in this command, an empty value means the program's default
        again = load_settings(file, command=command)
        assert [(one.setting.key, one.value or None) for one in again.effective] == [
            (one.setting.key, one.value or None) for one in usual.effective
        ]
