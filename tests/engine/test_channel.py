"""scheduler/engine/channel.py: the engine's end of the socket never blocks a step."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from scheduler.codec import FrameDecoder, Message, encode
from scheduler.engine.channel import OUTBOX_BYTES_MAX, Channel, FrontEndGoneError
from scheduler.messages import Abort, Activate, LoadProgress, Shutdown

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An engine's channel and the front end's raw end."""
    ours, theirs = socket.socketpair()
    yield Channel(ours), theirs
    ours.close()
    theirs.close()


def test_receive_returns_what_is_there_and_never_waits(pair: Pair) -> None:
    """An empty inbox is an empty list; several frames come in order, and are counted."""
    channel, front_end = pair
    assert channel.receive() == []
    front_end.sendall(encode(Abort((1,))) + encode(Shutdown()))
    assert channel.receive() == [Abort((1,)), Shutdown()]
    assert channel.num_messages_received == 2


def test_messages_can_be_taken_one_by_one_and_none_is_lost(pair: Pair) -> None:
    """`next_message` waits for one and leaves what came with it to later calls; only `receive` counts."""
    channel, front_end = pair
    assert not channel.has_message()
    front_end.sendall(encode(Activate(1)) + encode(Abort((1,))) + encode(Shutdown()))
    assert channel.has_message()
    assert channel.next_message() == Activate(1)
    channel.wait()  # what is kept here is not lost on whoever waits for the socket
    front_end.sendall(encode(Abort((2,))))
    assert channel.next_message() == Abort((1,))
    assert channel.num_messages_received == 0
    assert channel.receive() == [Shutdown(), Abort((2,))]
    assert channel.num_messages_received == 2
    later = threading.Timer(0.01, lambda: front_end.sendall(encode(Shutdown())))
    later.start()
    assert channel.next_message() == Shutdown()
    later.join()


def test_a_front_end_that_does_not_read_pauses_the_engine_and_loses_nothing(pair: Pair) -> None:
    """Sends return at once with a full socket, the channel says it is congested, and all arrives once it is read."""
    channel, front_end = pair
    message = LoadProgress("x" * 100_000, 0.0)
    count = 0
    while not channel.is_congested:
        channel.send(message)
        count += 1
    assert count * 100_000 > OUTBOX_BYTES_MAX

    received: list[Message] = []
    decoder = FrameDecoder()

    def read() -> None:
        while len(received) < count:
            received.extend(decoder.feed(front_end.recv(1 << 20)))

    reader = threading.Thread(target=read)
    reader.start()
    while channel._outbox:
        channel.wait()
    reader.join(timeout=60)
    assert received == [message] * count


def test_end_of_file_is_told_after_the_last_message(pair: Pair) -> None:
    """A front end that closes its end is noticed at the next receive, send or wait."""
    channel, front_end = pair
    front_end.close()
    with pytest.raises(FrontEndGoneError):
        channel.receive()
    with pytest.raises(FrontEndGoneError):
        channel.send(Shutdown())


def test_last_words_follow_what_was_still_waiting(pair: Pair) -> None:
    """A dying engine's report comes after whole earlier frames, never inside one."""
    channel, front_end = pair
    for _ in range(40):
        channel.send(LoadProgress("y" * 10_000, 0.0))
    thread = threading.Thread(target=lambda: channel.send_last_words(Shutdown(), timeout_s=30))
    thread.start()
    decoder = FrameDecoder()
    received: list[Message] = []
    while len(received) < 41:
        received += decoder.feed(front_end.recv(1 << 16))
    thread.join(timeout=60)
    assert received[-1] == Shutdown()


def test_last_words_give_up_on_a_front_end_that_does_not_read(pair: Pair) -> None:
    """A blocked socket delays a death by the bound given, not for ever."""
    channel, _ = pair
    while not channel.is_congested:
        channel.send(LoadProgress("z" * 100_000, 0.0))
    channel.send_last_words(Shutdown(), timeout_s=0.05)
    assert channel.is_congested


def test_a_timeout_of_years_is_one(pair: Pair) -> None:
    """Waiting requests may have deadlines as far away as a caller likes."""
    channel, front_end = pair
    front_end.sendall(encode(Abort((1,))))
    channel.wait(1e11)
    assert channel.receive() == [Abort((1,))]


def test_a_descriptor_above_1023_serves_as_well() -> None:
    """A front end with a thousand connections hands its engine a high descriptor; waiting on it works."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ours, front_end = socket.socketpair()
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 2000)
    ours.close()
    with socket.socket(fileno=high) as connection, front_end:
        channel = Channel(connection)
        front_end.sendall(encode(Shutdown()))
        channel.wait()
        assert channel.receive() == [Shutdown()]
        channel.send_last_words(Shutdown(), timeout_s=30)
        assert FrameDecoder().feed(front_end.recv(1 << 16)) == [Shutdown()]
