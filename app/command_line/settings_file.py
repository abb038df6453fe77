"""The file of `--config`: YAML, the manifest of an earlier run, or another system's file."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_adapter.app.compat import foreign
from llama_adapter.app.compat.importers import importer_of
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.record_lines import RecordFileError
from llama_adapter.runtime.settings.setting import SECTIONS
from llama_adapter.runtime.settings.yaml_file import SettingsFile, read_content, read_yaml, settings_in


def read_settings(path: str) -> SettingsFile:
    """The settings in a file: a file of this program, the last run of a manifest, or a file that `app/compat` supports.

    Raises UsageError, which names the line, for invalid content, and for a file that cannot be read.
    """
    if path.endswith("manifest.json"):
        return settings_in(_last_run(path), path)
    if path.endswith(foreign.COMMAND_SUFFIXES):
        return _foreign(foreign.import_file(path).check(path), path)
    content = read_content(path)  # read only once, because it may be a pipe
    data = read_yaml(path, content=content, as_written=True)
    if not data.keys() <= {"command", *SECTIONS}:
        typed = read_yaml(path, content=content)
        if (importer := importer_of(typed)) is not None:
            return _foreign(importer(typed).check(path), path)
    return settings_in(data, path)


def _foreign(imported: Any, path: str) -> SettingsFile:
    note = f"note: `llama-adapter config import {path}` says what became of each key"
    return dataclasses.replace(settings_in(imported.settings, path), notes=(note,))


def _last_run(path: str) -> Mapping[str, Any]:
    """The settings of the last run in a manifest."""
    from llama_adapter.app.jobs.records.manifest import read_manifest

    content = Path(path)
    if not content.is_file():
        raise UsageError(f"Cannot read `{path}`: there is no such file", hint="name a manifest of a run")
    records = (
        content.parent if content.name == "manifest.json" else content.with_name(content.name[: -len(".manifest.json")])
    )
    try:
        runs = read_manifest(records)
    except (OSError, RecordFileError) as error:
        raise UsageError(f"Cannot read `{path}`: {error}", hint="name a manifest of a run") from None
    found = [run.settings for run in runs if isinstance(run.settings, dict) and run.settings]
    if not found:
        raise UsageError(f"`{path}` has no run with settings", hint="runs of older versions have none")
    return found[-1]
