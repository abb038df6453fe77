"""Messages of ranks arrive before `set` returns, and the end of the first rank is an error."""

import socket
import threading
from collections.abc import Iterator

import pytest

from llama_adapter.app.models.parallel.messages import ReceivedMessages, SentMessages


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, SentMessages]]:
    """The first rank's end of the socket, and the messages at the other end."""
    ours, theirs = socket.socketpair()
    sent = SentMessages(theirs.detach())
    with ours, sent._connection:
        yield ours, sent


def test_a_message_is_there_when_set_returns_and_the_last_value_counts(
    pair: tuple[socket.socket, SentMessages],
) -> None:
    (ours, sent), received = pair, ReceivedMessages()
    received.receive(ours)
    ours.close()  # as the socket of a released child
    sent.set("hello/1", '{"torch": "2"}\n')
    assert received.get("hello/1") == b'{"torch": "2"}\n'
    assert not received.check(["hello/1", "beat/1"])
    threads = [threading.Thread(target=sent.clone().set, args=("beat/1", str(count))) for count in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received.check(["hello/1", "beat/1"])
    sent.set("beat/1", "last")
    assert received.get("beat/1") == b"last"


def test_messages_to_a_rank_that_has_ended_fail(pair: tuple[socket.socket, SentMessages]) -> None:
    ours, sent = pair
    ours.close()
    with pytest.raises(RuntimeError, match="the first rank has ended"):
        sent.set("beat/1", "0")
