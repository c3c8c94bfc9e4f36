"""The port that scrapers read: plain HTTP, `GET /metrics`, from a thread and an event loop of its own.

What lives here: the little HTTP there is, and its bounds. What must not: the metrics themselves. The server's own loop
never waits for a scraper, and a scraper never for that loop: it is answered even if the loop hangs, which is when
somebody wants to look. A connection is one request, has CONNECTION_TIMEOUT_S from its first byte to its last, and there
are CONNECTIONS_MAX at a time. Whoever comes beyond that is told 503, REFUSALS_MAX at a time; the rest is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, choose_encoder
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.registry import CollectorRegistry

from scheduler import logs
from scheduler.errors import StartupError

PATH = "/metrics"
CONNECTIONS_MAX = 16
REFUSALS_MAX = 16
CONNECTION_TIMEOUT_S = 5.0
HEADER_BYTES_MAX = 16 * 1024
BACKLOG = 64
STOP_TIMEOUT_S = 1.0
_PLAIN = "text/plain; charset=utf-8"
_HINT = f"Emberline. Metrics for Prometheus are at {PATH}\n".encode()


class MetricsExporter:
    """Answers scrapers. `start` binds, so a conflict is known at once."""

    def __init__(self, host: str, port: int, collector: PrometheusCollector) -> None:
        self._host = host
        self._port = port
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._num_connections = 0

    @property
    def address(self) -> str | None:
        """Where it listens; None before that."""
        if self._socket is None:
            return None
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        """Bind and begin to answer. Raises StartupError."""
        self._socket = _listening(self._host, self._port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._loop is not None and self._thread is not None:
            loop = self._loop
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(loop.stop)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        loop, listener = self._loop, self._socket
        assert loop is not None
        assert listener is not None
        try:
            # What is not read is not kept either: the reader's limit bounds the header.
            starting = asyncio.start_server(self._answer, sock=listener, limit=HEADER_BYTES_MAX)
            server = loop.run_until_complete(starting)
            loop.run_forever()
            server.close()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except Exception as error:  # noqa: BLE001 - a thread's last boundary; the server goes on without metrics
            logs.get_logger().error("metrics ended", **logs.describe(error))
        finally:
            loop.close()
            listener.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; whatever is wrong with it is its own affair."""
        self._num_connections += 1
        try:
            async with asyncio.timeout(CONNECTION_TIMEOUT_S):
                if self._num_connections > CONNECTIONS_MAX + REFUSALS_MAX:
                    return
                # Read in any case: an answer to a request that is not read is lost in the connection's reset.
                header = await reader.readuntil(b"\r\n\r\n")
                if self._num_connections > CONNECTIONS_MAX:
                    answer = _response(HTTPStatus.SERVICE_UNAVAILABLE, b"too many scrapers at once\n")
                else:
                    answer = self._response_to(header)
                writer.write(answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass  # the loop ends, and nobody waits for this task: asyncio would only complain that it was cancelled
        except Exception as error:  # noqa: BLE001 - our own bug, told, and no reason to answer nobody any more
            logs.get_logger().error("internal error", **logs.describe(error))
        finally:
            self._num_connections -= 1
            writer.transport.abort()

    def _response_to(self, header: bytes) -> bytes:
        request, *fields = header.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n", extra="Allow: GET, HEAD\r\n")
        if path == "/":
            return _response(HTTPStatus.OK, _HINT, with_body=method == "GET")
        if path != PATH:
            return _response(HTTPStatus.NOT_FOUND, _HINT, with_body=method == "GET")
        accept = next((field[7:].strip() for field in fields if field[:7].lower() == "accept:"), "")
        try:
            encode, content_type = choose_encoder(accept or CONTENT_TYPE_PLAIN_1_0_0)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder(CONTENT_TYPE_PLAIN_1_0_0)
        return _response(HTTPStatus.OK, encode(self._registry), content_type, with_body=method == "GET")


def _response(
    status: HTTPStatus, body: bytes, content_type: str = _PLAIN, *, extra: str = "", with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{extra}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


def _listening(host: str, port: int) -> socket.socket:
    """Bound as gRPC's port is: not shared with anybody."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = (error.strerror or "not an address of this machine").lower()
        raise StartupError(f"cannot listen on {host}:{port} for --metrics-port: {reason}") from None
    listener.setblocking(False)
    return listener
