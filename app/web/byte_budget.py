"""Room for bytes that wait in memory, shared by the tasks of one event loop."""

import asyncio


class ByteBudget:
    """Lets so many bytes be under way at once, or one file that is larger. Of one event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._freed = asyncio.Condition()

    async def acquire(self, num_bytes: int) -> None:
        """Wait for room."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._used == 0 or self._used + num_bytes <= self._most)
            self._used += num_bytes

    async def release(self, num_bytes: int) -> None:
        """Give the room back."""
        async with self._freed:
            self._used -= num_bytes
            self._freed.notify_all()
