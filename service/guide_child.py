"""One guide compiler's process from outside: exec, its socket, its reaped exit status.

What lives here: descriptors, the child's environment, its end. What must not: guides, and what becomes of those it had
(`guide_compiler.py`). As with an engine the child is exec'd from the main thread and has a process group of its own.
Nothing that it or its library prints is kept: it may quote a user's guide.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from scheduler import logs
from scheduler.codec import CodecError, FrameDecoder, Message, encode
from scheduler.guide_messages import GuideMessage

GUIDE_COMMAND = (sys.executable, "-P", "-m", "scheduler.engine.guide_process")
REAP_POLL_S = 0.005


class GuideChild:
    """A started process. It is lost once: by end of file, by a reset, or by bytes that are no frame."""

    def __init__(
        self, command: Sequence[str], on_message: Callable[[Message], None], on_lost: Callable[[], None]
    ) -> None:
        """Start it. Must run in the main thread, on a running loop. Raises OSError.

        `on_lost` is called after the last message, once, not before the process has been told to end.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._decoder = FrameDecoder()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._is_lost = False
        with contextlib.ExitStack() as undo:
            self._connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(self._connection.close)
            with child_end:
                self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, "--socket-fd", str(child_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(child_end.fileno(),),
                    env=_environment(),
                    process_group=0,
                )
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._pid_fd = os.pidfd_open(self._popen.pid)
            undo.pop_all()  # nothing failed: they are kept
        self._loop.add_reader(self._pid_fd, self._reap)
        self._connecting = self._loop.create_task(self._connect())

    @property
    def pid(self) -> int:
        """The process id; also that of its group."""
        return self._popen.pid

    def send(self, message: GuideMessage) -> None:
        """Goes to the transport's buffer; nothing waits."""
        if self._transport is None:
            self._unsent.append(encode(message))
        elif not self._is_lost:
            self._transport.write(encode(message))

    def kill(self) -> None:
        """SIGKILL to the process and its jobs. Its loss is told as any other."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _connect(self) -> None:
        transport, _ = await self._loop.create_unix_connection(lambda: _Wire(self), sock=self._connection)
        self._transport = transport
        for data in self._unsent:
            transport.write(data)
        self._unsent.clear()

    def receive(self, data: bytes) -> None:
        """The wire's word."""
        try:
            messages = self._decoder.feed(data)
        except CodecError:
            self.lose()
            return
        for message in messages:
            self._on_message(message)

    def lose(self) -> None:
        """The wire's word."""
        if self._is_lost:
            return
        self._is_lost = True
        self.kill()  # deaf, or dead already
        if self._transport is not None:
            self._transport.close()
        self._on_lost()

    def _reap(self) -> None:
        # The group is killed while the zombie still keeps its number from being given to others.
        self.kill()
        if self._popen.poll() is None:
            self._loop.call_later(REAP_POLL_S, self._reap)
            return
        if self._pid_fd >= 0:
            self._loop.remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = -1
            logs.get_logger().debug("guide compiler ended", pid=self.pid, exit_status=self._popen.returncode)


class _Wire(asyncio.Protocol):
    def __init__(self, child: GuideChild) -> None:
        self._child = child

    def data_received(self, data: bytes) -> None:
        self._child.receive(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self._child.lose()


def _environment() -> dict[str, str]:
    """One thread: it forks, and what it computes has no use for more."""
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(one, "1"), "TOKENIZERS_PARALLELISM": "false"}
