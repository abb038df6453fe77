"""The events of one request, for a reader in an event loop."""

import asyncio

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.serving.online.request_handle import RequestHandle
from tests.app.serving.online.waiting import WAIT_S


def piece(text: str) -> Event:
    return TextDelta(index=0, text=text)


async def groups_of(pause_s: float, *deliveries: list[Event]) -> list[list[str]]:
    """The texts of each group. Each delivery after the first one comes while the reader waits again."""
    handle = RequestHandle(1, cancel=lambda handle: None)
    found: list[list[str]] = []

    async def read() -> None:
        async for group in handle.groups(pause_s=pause_s):
            found.append([event.text for event in group])

    reading = asyncio.create_task(read())
    for delivery in deliveries:
        for event in delivery:
            handle.deliver(event)
        for _ in range(10):
            await asyncio.sleep(0)
    await asyncio.wait_for(reading, WAIT_S)
    return found


@pytest.mark.parametrize(
    ("pause_s", "expected"),
    [
        (0.0, [["a", "b"], ["c"], ["d", "abcd"]]),
        (10 * WAIT_S, [["a", "b"], ["c", "d", "abcd"]]),  # the answer ends the pause
    ],
)
def test_a_group_is_what_came_since_the_last_one_and_its_pause(pause_s: float, expected: list[list[str]]) -> None:
    whole = Answer(index=0, picture="a", digest="", prompt="", text="abcd", token_ids=(), finish="stop")
    deliveries = [piece("a"), piece("b")], [piece("c")], [piece("d"), whole]

    assert asyncio.run(groups_of(pause_s, *deliveries)) == expected
