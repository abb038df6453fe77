"""What the user named, as plain values: picklable, and nothing is opened."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """Where pictures come from. In this order: `paths`, then `lists`, then `manifests`."""

    paths: tuple[str, ...] = ()  # files, folders, patterns and tar archives
    lists: tuple[str, ...] = ()  # files with a file, folder or archive a line; `-` is stdin
    manifests: tuple[str, ...] = ()  # JSONL, CSV or TSV with a picture a line
    recursive: bool = False  # descend into the folders of folders
    limit: int | None = None  # only the first so many, of a shard its own
    shard: tuple[int, int] | None = None  # (i, n): the i-th of n parts, counted from 0, by the digest of the label

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.shard is not None:
            index, count = self.shard
            if not 0 <= index < count:
                raise ValueError(f"shard must be i/n with i from 0 to n - 1, got {index}/{count}")
