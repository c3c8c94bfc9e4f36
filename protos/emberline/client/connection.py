"""Where the servers are, and how a channel to them behaves.

What lives here: addresses → a gRPC target, the service config (balancing, health, retries), channel options,
credentials. What must not: calls. Everything that gRPC can do itself is left to it:

- *Balancing.* Several addresses, or a name with several, are one channel with `round_robin`.
- *Health.* The channel watches `emberline.v1.InferenceService` at each server (gRFC A17) and leaves out those that do
  not serve. A server without health checks counts as healthy.
- *Retries.* UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, up to `attempts_max` attempts with growing, jittered
  pauses, as long as nothing of the answer has come. A server's `grpc-retry-pushback-ms` overrides the pause; −1 forbids
  another attempt. Everything else, a poisonous request's INTERNAL first, is never tried again. There is no retry
  throttling: a server that has too much says so by pushback, and 200 streams that lose one server are no reason to
  give up on the 201st.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_PORT = 50051
HEALTH_SERVICE = "emberline.v1.InferenceService"
ATTEMPTS_MAX = 5
"""gRPC's own limit."""
KEEPALIVE_S = 20.0
"""The server tolerates one ping every 10 s. Without any, a peer that vanished during a long silence is never missed."""
KEEPALIVE_TIMEOUT_S = 10.0
RETRY_BUFFER_BYTES = 16 * 1024 * 1024
"""A request that does not fit cannot be sent again; the largest legal ones are a few megabytes, the default 256 KiB."""

Token: TypeAlias = str | Callable[[], str] | None
"""A bearer token, or what gives one: asked before each call, so that it may change."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS, by files in PEM. With neither of them the system's authorities are trusted and no certificate is shown.

    They are read when the client is made: a new client takes up new files.
    """

    ca_file: str | os.PathLike[str] | None = None
    """Authorities that are trusted instead of the system's."""
    cert_file: str | os.PathLike[str] | None = None
    """This client's certificate chain, for mutual TLS; `key_file` goes with it."""
    key_file: str | os.PathLike[str] | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ValueError, or OSError for a file that cannot be read."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both cert_file and key_file")
        ca, cert, key = (
            None if path is None else Path(path).read_bytes() for path in (self.ca_file, self.cert_file, self.key_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True, slots=True)
class Connection:
    """What `Client` and `AsyncClient` are made of, checked. Names among several addresses are looked up here."""

    target: str | Sequence[str] = DEFAULT_ADDRESS
    """See `Client`."""
    tls: Tls | grpc.ChannelCredentials | None = None
    server_name: str | None = None
    token: Token = field(default=None, repr=False)
    allow_plaintext_token: bool = False
    attempts_max: int = 4
    health_check: bool | None = None
    channel_options: Sequence[tuple[str, Any]] = ()
    uri: str = field(init=False)
    """The gRPC target."""

    def __post_init__(self) -> None:
        if not 1 <= self.attempts_max <= ATTEMPTS_MAX:
            raise ValueError(f"attempts_max must be in [1, {ATTEMPTS_MAX}]")
        if self.token is not None and self.tls is None and not self.allow_plaintext_token:
            exposed = [host for host, _ in map(split, self.addresses()) if not _is_loopback(host)]
            if exposed:
                raise ValueError(
                    f"a token would go to {exposed[0]} in the clear: use tls, or allow_plaintext_token=True if "
                    "something else protects the connection"
                )
        object.__setattr__(self, "uri", to_target(self.addresses()))

    def addresses(self) -> list[str]:
        """Each address on its own. Raises ValueError if there is none."""
        parts = self.target.split(",") if isinstance(self.target, str) else list(self.target)
        addresses = [part.strip() for part in parts if part.strip()]
        if not addresses:
            raise ValueError("no address given")
        return addresses

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        token = self.token() if callable(self.token) else self.token
        return () if token is None else (("authorization", f"Bearer {token}"),)

    def is_balanced(self) -> bool:
        """Whether unhealthy servers are to be left out. With a single one there is no other to take: a call to it is
        better answered by itself, with the reason and the time to wait.
        """
        if self.health_check is not None:
            return self.health_check
        addresses = self.addresses()
        return len(addresses) > 1 or _may_be_several(addresses[0])

    def dial(self, plain: Callable[..., Any], secure: Callable[..., Any], *, for_inference: bool) -> Any:
        """A channel by one of gRPC's two makers (of `grpc` or `grpc.aio`)."""
        options = self._options(with_health=for_inference and self.is_balanced())
        if self.tls is None:
            return plain(self.uri, options=options)
        credentials = self.tls.credentials() if isinstance(self.tls, Tls) else self.tls
        return secure(self.uri, credentials, options=options)

    def _options(self, *, with_health: bool) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.service_config", json.dumps(service_config(self.attempts_max, with_health=with_health))),
            ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            # A server that was restarted is found again in a moment, not after gRPC's two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES),
            # Log-probabilities of a long prompt are larger than the default of 4 MiB; the server bounds what it sends.
            ("grpc.max_receive_message_length", -1),
            ("grpc.primary_user_agent", "emberline-python"),
        ]
        name = self.server_name
        if name is None and self.tls is not None and _is_list(self.uri):
            name = split(self.addresses()[0])[0]  # else it would be the whole list, which no certificate has
        if name is not None:
            options.append(("grpc.default_authority", name))
            if self.tls is not None:
                options.append(("grpc.ssl_target_name_override", name))
        return [*options, *self.channel_options]


def service_config(attempts_max: int, *, with_health: bool) -> dict[str, Any]:
    """gRPC's service config; its JSON names are gRPC's own."""
    method: dict[str, Any] = {"name": [{}]}
    if attempts_max > 1:
        method["retryPolicy"] = {
            "maxAttempts": attempts_max,
            "initialBackoff": "0.2s",
            "maxBackoff": "5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [method]}
    if with_health:
        config["healthCheckConfig"] = {"serviceName": HEALTH_SERVICE}
    return config


def split(address: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `1.2.3.4:port` or `[::1]:port`; a target with a scheme is its own host.

    Raises ValueError.
    """
    if _has_scheme(address):
        return address, 0
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(DEFAULT_PORT)
    elif ":" in host and not host.startswith("["):
        raise ValueError(f"{address}: an IPv6 address goes in brackets, as in [::1]:{DEFAULT_PORT}")
    if not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"{address}: expected HOST or HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def to_target(addresses: Sequence[str]) -> str:
    """The gRPC target of the addresses together.

    One name is left to gRPC, which looks it up again whenever its connections break. Of several, gRPC wants IP
    addresses: names are looked up here, once. Raises ValueError for a mixture that no target can express, OSError for
    a name that cannot be looked up.
    """
    if len(addresses) == 1 and _has_scheme(addresses[0]):
        return addresses[0]
    pairs = [split(address) for address in addresses]
    if any(port == 0 for _, port in pairs):
        raise ValueError("a target with a scheme stands alone")
    if len(pairs) == 1 and _literal(pairs[0][0]) is None:
        return f"dns:///{pairs[0][0]}:{pairs[0][1]}"
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        found = [_look_up(host, port, family) for host, port in pairs]
        if all(found):
            unique = dict.fromkeys(address for group in found for address in group)
            return f"{scheme}:{','.join(unique)}"
    raise ValueError("the addresses are not all reachable by IPv4, nor all by IPv6")


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[str]:
    literal = _literal(host)
    if literal is not None:
        fits = (literal.version == 4) == (family == socket.AF_INET)
        return [_join(host, port, family)] if fits else []
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_ADDRFAMILY, socket.EAI_NODATA):
            return []
        raise
    return [_join(str(info[4][0]), port, family) for info in found]


def _join(host: str, port: int, family: socket.AddressFamily) -> str:
    return f"{host}:{port}" if family == socket.AF_INET else f"[{host}]:{port}"


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _has_scheme(address: str) -> bool:
    return "://" in address or address.startswith(("unix:", "dns:", "ipv4:", "ipv6:", "unix-abstract:"))


def _is_list(target: str) -> bool:
    return target.startswith(("ipv4:", "ipv6:"))


def _may_be_several(address: str) -> bool:
    if _has_scheme(address):
        return not address.startswith(("unix:", "unix-abstract:")) and ("dns:" in address or "," in address)
    host, _ = split(address)
    return _literal(host) is None and host != "localhost"


def _is_loopback(host: str) -> bool:
    if host.startswith(("unix:", "unix-abstract:")) or host == "localhost":
        return True
    literal = _literal(host)
    return literal is not None and literal.is_loopback
