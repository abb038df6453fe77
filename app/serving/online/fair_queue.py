"""A queue in which owners take turns, so that one item does not wait for a hundred items of another owner."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Round-robin over owners; first in, first out for the items of each owner. Not thread-safe."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, deque[Item]] = OrderedDict()  # the next owner first; only owners with items

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __iter__(self) -> Iterator[Item]:
        """The items, in arbitrary order."""
        return chain.from_iterable(self._owners.values())

    def put(self, item: Item, *, owner: str) -> None:
        """Append an item to its owner's items."""
        self._owners.setdefault(owner, deque()).append(item)

    def take(self) -> Item | None:
        """Remove and return the next item; None if the queue is empty."""
        if not self._owners:
            return None
        owner, items = next(iter(self._owners.items()))
        item = items.popleft()
        self._owners.move_to_end(owner)
        if not items:
            del self._owners[owner]
        return item

    def remove(self, item: Item, *, owner: str) -> None:
        """Remove an item, if it is in the queue."""
        items = self._owners.get(owner, ())
        if item in items:
            self._owners[owner].remove(item)
            if not items:
                del self._owners[owner]
