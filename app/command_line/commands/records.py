"""`export-records`."""

import argparse
from typing import Any

from llama_adapter.app.command_line.flags import command
from llama_adapter.app.command_line.values import settings


def add_export_records(commands: Any) -> None:
    """Add `export-records`."""
    command(commands, "export-records", _run_export_records)


def _run_export_records(options: argparse.Namespace) -> int:
    from llama_adapter.app.jobs.exports.job import ExportRecordsJob, run_export_records

    return run_export_records(
        settings(ExportRecordsJob, {**vars(options), "records": tuple(options.records), "below": tuple(options.below)})
    )
