"""What a user may say of a job over many machines, and why there may be none. Plain values; imports no Ray."""

from dataclasses import dataclass

from llama_adapter.runtime.errors import LlamaAdapterError


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """Where a job runs, and on how many devices."""

    actors: int | None = None  # captioners at once; None: one for every device of the cluster
    address: str | None = None  # of a running cluster; None: that of RAY_ADDRESS, else this machine alone

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ValueError(f"actors must be at least 1, got {self.actors}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                f"address must be HOST:PORT of the cluster itself, got {self.address!r}: a job is started on one "
                "of its machines, not through Ray's client"
            )


class WorkersFailedError(LlamaAdapterError):
    """What runs on other machines cannot go on; `hint` says what to do."""
