"""Items wait until there is room for them, and a large one goes alone."""

import asyncio
import math

import pytest

from llama_adapter.app.serving.online.room import Room


@pytest.mark.parametrize(
    ("most_items", "sizes", "expected"),
    [
        (math.inf, (6, 6, 50), ["a ends", "b begins", "b ends", "c begins", "c ends"]),
        (math.inf, (4, 6, 1), ["b begins", "a ends", "c begins"]),
        (2, (1, 1, 1), ["b begins", "a ends", "c begins"]),
    ],
)
def test_items_wait_until_there_is_room_and_a_large_one_goes_alone(
    most_items: float, sizes: tuple[int, ...], expected: list[str]
) -> None:
    async def main() -> list[str]:
        room, order = Room(most_bytes=10, most_items=most_items), []

        async def use(name: str, size: int, may_end: asyncio.Event) -> None:
            await room.take(size)
            order.append(f"{name} begins")
            await may_end.wait()
            order.append(f"{name} ends")
            room.give_back(size)

        ends = [asyncio.Event() for _ in sizes]
        tasks = [asyncio.create_task(use(name, size, end)) for name, size, end in zip("abc", sizes, ends, strict=True)]
        for end in ends:
            await asyncio.sleep(0)
            end.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        return order

    assert [step for step in asyncio.run(main()) if step in expected] == expected
