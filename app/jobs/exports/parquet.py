"""Writes records to a Parquet file with a fixed schema. Imports pyarrow when it is needed."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO, Final

from llama_adapter.app.captioning.decisions.decider import Decision
from llama_adapter.app.jobs.records.record import Record

ROWS_IN_A_GROUP: Final = 10_000


def write_parquet(
    rows: Iterable[tuple[Record, Decision | None]], file: BinaryIO, *, runs: list[dict[str, Any]] | None = None
) -> None:
    """Write the columns of `parquet_schema` in row groups, in bounded memory. The metadata contains `runs`.

    `runs` are the runs in the manifests. The schema does not depend on the records, so that the files of all shards of
    a job can be combined.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = parquet_schema().with_metadata({b"llama-adapter-runs": json.dumps(runs or []).encode()})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        rest = iter(rows)
        while group := list(islice(rest, ROWS_IN_A_GROUP)):
            writer.write_table(pa.Table.from_pylist([_row(*one) for one in group], schema=schema))


def parquet_schema() -> Any:
    """A pyarrow schema: the fields of a record, its error in two columns, and the decision."""
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("picture", pa.string(), nullable=False),
            pa.field("prompt", pa.string(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("finish", pa.string(), nullable=False),
            pa.field("choice", numbers),  # probabilities before calibration
            pa.field("decision", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("tokens", pa.int64(), nullable=False),
            pa.field("unfamiliar", pa.bool_()),  # null if the model cannot tell
            pa.field("error_code", pa.string()),
            pa.field("error_message", pa.string()),
            pa.field("ms", numbers, nullable=False),
            pa.field("run", pa.string(), nullable=False),
        ]
    )


def _row(record: Record, decision: Decision | None) -> dict[str, Any]:
    error = record["error"]
    return {
        **{name: _text(record[name]) for name in ("id", "picture", "prompt", "text", "finish", "run")},
        "choice": None if record["choice"] is None else list(_pairs(record["choice"])),
        "decision": None if decision is None else _text(decision.text),
        "probability": None if decision is None else decision.probability,
        "tokens": record["tokens"],
        "unfamiliar": record.get("unfamiliar"),
        "error_code": None if error is None else _text(error["code"]),
        "error_message": None if error is None else _text(error["message"]),
        "ms": list(_pairs(record["ms"])),
    }


def _pairs(values: Mapping[str, float | None]) -> Iterator[tuple[str, float | None]]:
    return ((_text(name), value) for name, value in values.items())


def _text(text: str) -> str:
    """Text as valid UTF-8: lone surrogates, which a record may contain, become escapes."""
    return text.encode(errors="backslashreplace").decode()
