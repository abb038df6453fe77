"""Owners take turns, and no item is lost or duplicated."""

from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.serving.online.fair_queue import FairQueue


def filled(items: list[str]) -> FairQueue[str]:
    """A queue of items; an item is named by its owner's letter and a number."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.put(item, owner=item[0])
    return queue


def test_owners_take_turns_and_a_late_one_is_next() -> None:
    queue = filled(["a1", "a2", "a3", "b1", "c1", "c2"])
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]

    queue = filled([f"a{number}" for number in range(100)])
    queue.take()
    queue.put("b1", owner="b")
    assert [queue.take(), queue.take()] == ["a1", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "take", "remove"])), max_size=60))
def test_each_owner_has_a_fifo_queue(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    expected: dict[str, list[tuple[str, int]]] = {"a": [], "b": [], "c": []}
    for number, (owner, step) in enumerate(steps):
        if step == "put":
            queue.put((owner, number), owner=owner)
            expected[owner].append((owner, number))
        elif step == "remove" and expected[owner]:
            item = expected[owner].pop()
            for _ in range(2):  # the second time, the item is not in the queue
                queue.remove(item, owner=owner)
        elif step == "take":
            taken = queue.take()
            assert (taken is None) == (not any(expected.values()))
            if taken is not None:
                assert taken == expected[taken[0]].pop(0)
        assert len(queue) == sum(map(len, expected.values()))
