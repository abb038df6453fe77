"""Commands of the first rank to all others: JSON in tensors of bytes, over a process group of the hosts."""

import json
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from llama_adapter.runtime.ranks import CollectiveError, collective

_HEAD_BYTES: Final = 4096  # size of a command's first broadcast, which is enough for nearly all commands
_LENGTH_BYTES: Final = 8


class Channel:
    """One rank's end of the channel. For every `send` of the first rank, each other rank must call `receive`."""

    def __init__(self, group: Any) -> None:
        """`group` is a process group that computes on the CPU, for every device of the decoder."""
        self._group: Any | None = group

    def close(self) -> None:
        """Release the group: it listens on a port as long as anything refers to it. Can be called again."""
        self._group = None

    def send(self, command: dict[str, Any]) -> None:
        """Send a command of plain values. Raises CollectiveError."""
        text = json.dumps(command).encode()
        data = torch.frombuffer(bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text), dtype=torch.uint8)
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu")
        head[: len(data)] = data[:_HEAD_BYTES]
        self._broadcast(head)
        if len(data) > _HEAD_BYTES:
            self._broadcast(data[_HEAD_BYTES:].contiguous())

    def receive(self) -> dict[str, Any]:
        """Wait for the next command. Raises CollectiveError if the first rank ends."""
        head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        self._broadcast(head)
        length = int.from_bytes(head[:_LENGTH_BYTES].numpy().tobytes(), "little")
        text = head[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            self._broadcast(rest)
            text += rest.numpy().tobytes()
        command: dict[str, Any] = json.loads(text)
        return command

    def send_numbers(self, values: Tensor) -> None:
        """Send float32 numbers; the previous command contains their shape. Raises CollectiveError."""
        self._broadcast(values.contiguous())

    def receive_numbers(self, shape: list[int]) -> Tensor:
        """Receive the float32 numbers of `send_numbers`. Raises CollectiveError."""
        values = torch.empty(shape, dtype=torch.float32)
        self._broadcast(values)
        return values

    def _broadcast(self, values: Tensor) -> None:
        if self._group is None:  # torch would use the default group
            raise CollectiveError("the channel is closed")
        with collective():
            dist.broadcast(values, src=0, group=self._group)
