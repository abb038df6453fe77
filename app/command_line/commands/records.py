"""`export-records`, and the flags that decide between choices."""

import argparse
from typing import Any

from llama_adapter.app.command_line.parser import Parser, command
from llama_adapter.app.command_line.values import parse_band, parse_text, settings

_EXPORT_RECORDS = """\
Convert records to a text file for each picture, a table, or a data set. The records are not changed. If a picture
failed and was answered later, the answer is exported.

  llama-adapter export-records captions.jsonl --to sidecars
  llama-adapter export-records captions.jsonl --to sidecars --template "shapeart, {text}" --suffix .caption
  llama-adapter export-records answers.jsonl --to csv --out answers.csv --threshold 0.7
"""


def add_deciding(group: Any) -> None:
    group.add_argument(
        "--threshold",
        metavar="P",
        type=float,
        help="with two choices: take the first if its probability is at least P, else the second; with more: take the "
        "most likely one if its probability is at least P, else none",
    )
    group.add_argument(
        "--abstain",
        metavar="LOW,HIGH",
        type=parse_band,
        separator=",",
        help="with two choices: undecided while the probability of the first is between these; with more: undecided "
        "unless the most likely one reaches --threshold (default: HIGH)",
    )
    group.add_argument(
        "--calibration", metavar="FILE.json", help="apply the temperature and threshold that --calibrate found"
    )


def add_export_records(commands: Any) -> None:
    text = "convert records to text files, tables and data sets"
    command(commands, "export-records", _run_export_records, declare=_declare, help=text, description=_EXPORT_RECORDS)


def _declare(parser: Parser) -> None:
    parser.add_argument(
        "records",
        section="input",
        metavar="RECORDS",
        nargs="*",
        required=True,
        help="files of records, or folders of .jsonl files; read in order",
    )
    export = parser.add_argument_group("output", section="output")
    export.add_argument(
        "--to",
        choices=("sidecars", "xmp", "csv", "metadata", "kohya", "parquet", "jsonl", "paddlenlp"),
        required=True,
        help="sidecars: a .txt for each picture; xmp: the description in an .xmp for each; csv: a table for "
        "spreadsheets; metadata: Hugging Face's metadata.jsonl; kohya: metadata.json of kohya's trainers; parquet "
        "(extra `parquet`); jsonl: records without the superseded ones; "
        "paddlenlp: lines of src, tgt (empty) and output",
    )
    export.add_argument(
        "--out",
        metavar="PATH",
        help="csv, jsonl: file to write (default: stdout); parquet, kohya: file to write; sidecars, xmp: folder "
        "for the texts (default: next to the pictures); metadata: the pictures' folder",
    )
    export.add_argument(
        "--template",
        metavar="TEXT",
        help="sidecars, xmp, metadata, kohya: what is written, with {text}, {stem} (the picture's name without suffix) "
        "and {parent} (its folder's name)",
    )
    export.add_argument(
        "--suffix",
        metavar=".SUFFIX",
        help="sidecars, xmp: replaces the suffix of the picture (default: .txt for sidecars; for xmp, .xmp is added: "
        "a.jpg.xmp)",
    )
    export.add_argument(
        "--existing",
        choices=("refuse", "keep", "replace", "extend"),
        help="sidecars, xmp: what happens to a file with another text; extend adds the new text after a comma; an .xmp "
        "keeps everything but its description (default: refuse)",
    )
    export.add_argument(
        "--below",
        metavar="FOLDER",
        action="append",
        default=[],
        help="sidecars, xmp: write texts next to pictures in this folder and its sub-folders; may be given several "
        "times (default: the current folder and that of the records)",
    )
    export.add_argument(
        "--rows-per-file",
        metavar="N",
        type=int,
        help="make --out a folder of files with this many rows each (csv, jsonl, parquet)",
    )
    export.add_argument(
        "--prompt",
        key="only_prompt",
        section="input",
        metavar="TEXT",
        type=parse_text,
        help="only records of this prompt",
    )
    export.add_argument("--only-answers", section="input", action="store_true", help="leave out records with an error")
    export.add_argument(
        "--skip-unfamiliar",
        section="input",
        action="store_true",
        help="leave out pictures that the model marked as unlike its training pictures",
    )
    add_deciding(parser.add_argument_group("decisions, for records with choices", section="output"))
    export.add_argument("--force", action="store_true", help="replace files; the same as --existing replace for texts")
    export.add_argument("--quiet", action="store_true", help="no notes on stderr")


def _run_export_records(options: argparse.Namespace) -> int:
    from llama_adapter.app.jobs.exports.job import ExportRecordsJob, run_export_records

    return run_export_records(
        settings(ExportRecordsJob, {**vars(options), "records": tuple(options.records), "below": tuple(options.below)})
    )
