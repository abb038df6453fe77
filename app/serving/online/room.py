"""For the tasks of one event loop: room for what they hold, such as files that wait for their answers; their end."""

import asyncio
import math


class Room:
    """Limits the number of items that are held at once, and their total size. An item above the size passes alone."""

    def __init__(self, *, most_bytes: int, most_items: float = math.inf) -> None:
        self._most_bytes, self._most_items = most_bytes, most_items
        self._num_bytes = self._num_items = 0
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Wait until there is room for an item of `num_bytes`, and take it."""
        while self._num_items and (
            self._num_items >= self._most_items or self._num_bytes + num_bytes > self._most_bytes
        ):
            self._freed.clear()
            await self._freed.wait()
        self._num_items += 1
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release the room of an item."""
        self._num_items -= 1
        self._num_bytes -= num_bytes
        self._freed.set()


async def cancel_all() -> None:
    """Cancel all other tasks of this event loop, and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
