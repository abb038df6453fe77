"""A queue in which owners take turns: who waits with one item is not behind another's hundred. No threads here."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First come, first served within an owner; owners in turn."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, deque[Item]] = OrderedDict()  # whose turn it is, first; none without items
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """The items, in no order."""
        return chain.from_iterable(self._owners.values())

    def put(self, item: Item, *, owner: str) -> None:
        """Add an item behind the owner's others."""
        self._owners.setdefault(owner, deque()).append(item)
        self._length += 1

    def take(self) -> Item | None:
        """The next item, of the owner whose turn it is; None when there is none."""
        if not self._owners:
            return None
        owner, items = next(iter(self._owners.items()))
        item = items.popleft()
        self._owners.move_to_end(owner)
        if not items:
            del self._owners[owner]
        self._length -= 1
        return item

    def remove(self, item: Item, *, owner: str) -> bool:
        """Take this item out; says whether it was there."""
        items = self._owners.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._owners[owner]
        self._length -= 1
        return True
