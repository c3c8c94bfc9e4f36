"""One port: opened, and opened anew.

What lives here: gRPC's server object behind one address. What must not: which services it offers, when it begins and
ends; `server.py` knows. grpcio 1.84 and 1.85 decode a method's name in their own loop, so one call whose path is no
UTF-8 ends it, and the port with it. Streams and Watches go on, so nobody would notice that no new caller gets in: hence
`lost`, and `listen_again`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import grpc

from scheduler import logs
from scheduler.errors import StartupError


class Listener:
    """One address. `bind`, then `start`; `close` is for a process that outlives its server.

    Args:
        host: A name or an address, without brackets.
        port: 0 picks a free one.
        make_server: A new server with all that is offered here, and no port.
        make_credentials: What the port is secured with; None: it is in plaintext.
    """

    def __init__(
        self,
        host: str,
        port: int,
        make_server: Callable[[], grpc.aio.Server],
        make_credentials: Callable[[], grpc.ServerCredentials] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._make_server = make_server
        self._make_credentials = make_credentials
        self._server = make_server()
        self._lost_servers: list[grpc.aio.Server] = []

    @property
    def address(self) -> str:
        """As gRPC writes it; the port is the one it has, once bound."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def bind(self) -> None:
        """Raises StartupError."""
        try:
            self._port = self._add_port()
        except RuntimeError:
            raise StartupError(f"cannot listen on {self.address}: {self._why_not()}") from None

    async def start(self) -> None:
        """Take calls."""
        await self._server.start()

    async def close(self) -> None:
        """End the port and its calls."""
        await self._server.stop(None)

    def lost(self) -> asyncio.Future[bool]:
        """Done when gRPC's own loop has ended. Never cancelled: that would reach the future its stop waits for."""
        return asyncio.ensure_future(self._server.wait_for_termination())

    async def listen_again(self, lost: asyncio.Future[bool]) -> bool:
        """Open the port anew; False if it cannot be had again."""
        error = lost.exception()
        described = {} if error is None else logs.describe(error)
        logs.get_logger().warning("listener lost", address=self.address, **described)
        self._lost_servers.append(self._server)  # its calls go on; collected, it would cancel them
        self._server = self._make_server()
        try:
            self._add_port()
        except RuntimeError:
            logs.get_logger().error("port lost", address=self.address)
            return False
        await self._server.start()
        return True

    def _add_port(self) -> int:
        if self._make_credentials is None:
            return self._server.add_insecure_port(self.address)
        return self._server.add_secure_port(self.address, self._make_credentials())

    def _why_not(self) -> str:
        """gRPC does not tell why it could not bind; the system does."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as error:
            return (error.strerror or "not an address of this machine").lower()
        if self._make_credentials is not None:
            return "gRPC refuses the certificate, its key or the client authorities, or the port was taken a moment ago"
        return "the port was taken a moment ago"
