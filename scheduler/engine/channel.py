"""The engine's end of its socket: frames in, frames out, never blocking a step.

One thread owns it: the engine's loop reads and writes between steps, so that no second thread competes for the
interpreter while a step runs. What the front end has not taken yet waits in a buffer; the loop makes no new step while
that buffer is over its bound (`is_congested`), so a front end that stops reading pauses the engine instead of growing
it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque

from scheduler.codec import FrameDecoder, Message, encode

OUTBOX_BYTES_MAX = 8 * 1024 * 1024
_RECV_BYTES = 256 * 1024
_POLL_S_MAX = 86400.0
"""poll() takes milliseconds in an int, which is less than a month; a caller's deadline may be years away."""


class FrontEndGoneError(Exception):
    """The other end of the socket is closed: nobody is left to work for."""


class Channel:
    """Frames over a connected stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._decoder = FrameDecoder()
        self._inbox: deque[Message] = deque()
        self._outbox = bytearray()
        self._lock = threading.Lock()  # only `send_last_words` may come from another thread
        self.num_messages_received = 0
        """Those that `receive` gave: the front end's count of what it sent to a serving engine is held against it."""

    @property
    def is_congested(self) -> bool:
        """True while more than `OUTBOX_BYTES_MAX` wait to be taken."""
        return len(self._outbox) > OUTBOX_BYTES_MAX

    def receive(self) -> list[Message]:
        """All messages that have arrived; never waits.

        Raises:
            FrontEndGoneError: end of file, or a reset connection.
            CodecError: the bytes are no frames of ours.
        """
        self._read()
        messages = list(self._inbox)
        self._inbox.clear()
        self.num_messages_received += len(messages)
        return messages

    def has_message(self) -> bool:
        """True if `next_message` would not wait. Raises what `receive` does."""
        self._read()
        return bool(self._inbox)

    def next_message(self) -> Message:
        """The next message alone, waited for as long as it takes; what comes with it stays for later calls.

        For the conversation before an engine serves; such messages are not counted. Raises what `receive` does.
        """
        while not self.has_message():
            self.wait()
        return self._inbox.popleft()

    def send(self, message: Message) -> None:
        """Queue `message` and write what the socket takes now; never waits.

        Raises:
            FrontEndGoneError: the other end is closed.
        """
        with self._lock:
            self._outbox += encode(message)
            self._flush()

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until something arrives or some of the outbox can leave; if congested, only until the latter. No longer
        than `timeout_s`.

        Raises:
            FrontEndGoneError: the other end is closed.
        """
        if self._inbox:
            return
        readable = 0 if self.is_congested else select.POLLIN
        writable = select.POLLOUT if self._outbox else 0
        if self._poll(readable | writable, timeout_s) & ~select.POLLIN:  # room, or a hang-up that the write will tell
            with self._lock:
                self._flush()

    def send_last_words(self, message: Message, *, timeout_s: float) -> None:
        """Write out everything and `message`, waiting at most `timeout_s`; failure to do so is ignored.

        Callable from any thread: the process ends right after.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return
        deadline = time.monotonic() + timeout_s
        self._outbox += encode(message)
        with contextlib.suppress(FrontEndGoneError, OSError):
            self._flush()
            while self._outbox and (remaining_s := deadline - time.monotonic()) > 0:
                self._poll(select.POLLOUT, remaining_s)
                self._flush()

    def _read(self) -> None:
        """Take whatever has arrived. What came before an end of file is dropped with it: nobody waits for answers."""
        while True:
            try:
                data = self._socket.recv(_RECV_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontEndGoneError(str(error)) from None
            if not data:
                raise FrontEndGoneError("end of file")
            self._inbox.extend(self._decoder.feed(data))

    def _poll(self, events: int, timeout_s: float | None = None) -> int:
        """Wait for one of `events` and return those that came. Not select(): it refuses descriptors above 1023, and
        ours has the number that the front end, with all its connections, had free.
        """
        poll = select.poll()
        poll.register(self._socket, events)
        came = poll.poll(None if timeout_s is None else min(timeout_s, _POLL_S_MAX) * 1000)
        return came[0][1] if came else 0

    def _flush(self) -> None:
        while self._outbox:
            try:
                num_sent = self._socket.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontEndGoneError(str(error)) from None
            del self._outbox[:num_sent]
