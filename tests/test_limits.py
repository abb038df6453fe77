"""docs/limits.md lists every limit of the code, with its default and its flag."""

import ast
import importlib
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.command_line.main import build_parser
from llama_adapter.app.serving.http_api.api import ApiSettings
from llama_adapter.app.serving.http_api.file_store import FileLimits
from llama_adapter.app.serving.http_api.guards import GuardSettings
from llama_adapter.app.serving.http_api.pictures import PictureSettings
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.web.archive import ArchiveLimits
from tests.app.serving.http_api.test_refusals import all_cases

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "limits.md").read_text()
UNITS = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ROW = re.compile(r"^\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|$", re.MULTILINE)
PLACE = re.compile(r"`(?P<module>[a-z_.]+):(?P<name>\w+)(?:\.(?P<field>\w+))?`(?: \(`(?P<flag>--[a-z-]+)`\))?")
# Limits without a default, and the values that set them.
DEFAULTED_ELSEWHERE = {
    ("PictureSettings", "max_picture_bytes"): ApiSettings().pictures.max_picture_bytes,
    ("ArchiveLimits", "max_entry_bytes"): ServiceLimits().max_picture_bytes,
}
# Folders in which every public constant with the form of a limit must be listed.
ROOMS = (
    "app/pictures/inputs",
    "app/learning/labelled",
    "app/pictures/reading",
    "runtime/settings",
    "app/serving/http_api",
    "app/serving/online",
    "app/serving/web",
    "vision/image.py",
)
# Codes on the pages for which `all_cases` has no request: they need load, time or files.
UNCHECKED = {
    "limits.md": {"busy", "crashed", "deadline", "file_too_large", "overloaded", "reading_busy", "request_timeout"}
    | {"storage_full", "timeout", "too_many_batches", "too_many_files", "unsupported_schema"},
    "zh/faq.md": {"busy", "deadline", "reading_busy"},
}
CONSTANT = re.compile(r"(DEFAULT_)?MAX_\w+|DEFAULT_\w+_BYTES|\w+_LIMIT_S")


@dataclass(frozen=True, slots=True)
class Limit:
    """A row of the page."""

    text: str
    default: float
    module: str
    name: str
    field: str | None
    flag: str | None


def page_limits() -> list[Limit]:
    limits = []
    for text, default, place, _ in ROW.findall(PAGE):
        if text.strip() == "limit" or set(text.strip()) == {"-"}:
            continue
        number, _, unit = default.strip().partition(" ")
        where = PLACE.fullmatch(place.strip())
        assert where is not None, f"no place in the code: {place}"
        limits.append(Limit(text.strip(), float(number.replace(",", "")) * UNITS[unit], **where.groupdict()))
    return limits


LIMITS = page_limits()


def default_in_code(limit: Limit) -> Any:
    found = getattr(importlib.import_module(f"llama_adapter.{limit.module}"), limit.name)
    if limit.field is None:
        return found
    if isinstance(getattr(found, limit.field, None), property):
        return getattr(found(), limit.field)
    field = next(field for field in fields(found) if field.name == limit.field)
    return DEFAULTED_ELSEWHERE[limit.name, limit.field] if field.default is MISSING else field.default


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.name}.{limit.field}")
def test_a_default_on_the_page_is_that_of_the_code(limit: Limit) -> None:
    assert default_in_code(limit) == limit.default, limit.text


@pytest.mark.parametrize("kind", [ServiceLimits, GuardSettings, PictureSettings, FileLimits, ArchiveLimits])
def test_every_number_of_the_settings_is_on_the_page(kind: type) -> None:
    wanted = {field.name for field in fields(kind) if field.type in (int, float)}
    wanted |= {name for name, value in vars(kind).items() if isinstance(value, property)}
    assert wanted
    assert wanted == {limit.field for limit in LIMITS if limit.name == kind.__name__}


def test_every_constant_that_is_a_limit_is_on_the_page_once() -> None:
    places = [(limit.module, limit.name, limit.field) for limit in LIMITS]
    assert len(set(places)) == len(places)
    named = {(limit.module, limit.name) for limit in LIMITS}
    missing = []
    for room in ROOMS:
        path = ROOT / room
        files = [path] if path.is_file() else sorted(path.glob("*.py"))
        assert files, room
        for file in files:
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            for node in ast.parse(file.read_text()).body:
                target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
                if isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) and (module, target.id) not in named:
                    missing.append(f"{module}:{target.id}")
    assert missing == [], "add them to docs/limits.md"


def flags(*command: str) -> dict[str, Any]:
    """Flags of a command line, with their defaults."""
    parser = build_parser()
    for word in command:
        (choices,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
        parser = choices[word]
    parser.fill()
    return {flag: action.default for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.flag], ids=lambda limit: limit.flag)
def test_a_flag_on_the_page_exists_and_has_that_default(limit: Limit) -> None:
    commands = ("caption", "ask") if limit.module.startswith("app.jobs") else ("serve", "web")
    for command in commands:
        scale = 2**20 if str(limit.flag).endswith("-mib") else 1
        assert flags(command)[str(limit.flag)] * scale == limit.default, command


def test_the_context_in_the_text_is_that_of_the_code() -> None:
    from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT

    assert f"{DEFAULT_CONTEXT} tokens (`app.models.checkpoints:DEFAULT_CONTEXT`, `--context`)" in PAGE


@pytest.mark.parametrize("page", ["limits.md", "zh/faq.md"])
def test_the_status_of_a_refusal_is_that_of_the_server(page: str) -> None:
    refused = {(str(case.status), case.code) for case in all_cases(port=1)}
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"(\d{3}) `(\w+)`(?: or `(\w+)`)?", text)
    stated = {(status, code) for status, *codes in rows for code in codes if code}
    checked = {(status, code) for status, code in stated if code in dict(map(reversed, refused))}

    assert checked <= refused
    assert {code for _, code in stated - checked} == UNCHECKED[page]
