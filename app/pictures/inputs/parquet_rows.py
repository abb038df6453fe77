"""Rows of Parquet files, also with pictures inside, as the `datasets` library writes them. Imports pyarrow inside."""

from collections.abc import Iterator

from llama_adapter.app.pictures.inputs.items import InputsError, Row
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.text import shown_name

_ROWS_AT_ONCE = 256  # each may hold a picture


def check_pyarrow() -> None:
    """Raise UsageError if pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Parquet needs pyarrow, and it cannot be imported: {error}", hint=install_hint("parquet")
        ) from None


def parquet_rows(path: str, *, what: str) -> Iterator[Row]:
    """The rows, in bounded memory. A picture inside is an object with its `bytes` and `path`. Raises `InputsError`."""
    check_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(line=number, values=values)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputsError(
            f"Wanted to read the {what} `{shown_name(path)}`, but {reason}.", hint="copy it again"
        ) from None
