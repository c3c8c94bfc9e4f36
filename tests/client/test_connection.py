"""Addresses, credentials, and what a channel is told."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from emberline.client import Tls
from emberline.client.connection import ATTEMPTS_MAX, Connection, service_config, split, to_target


@pytest.mark.parametrize(
    ("address", "pair"),
    [
        ("host", ("host", 50051)),
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]", ("::1", 50051)),
        ("[::1]:7", ("::1", 7)),
        ("unix:/run/x.sock", ("unix:/run/x.sock", 0)),
    ],
)
def test_addresses(address: str, pair: tuple[str, int]) -> None:
    """The port may be left out."""
    assert split(address) == pair


@pytest.mark.parametrize("address", ["host:", "host:x", "host:0", "host:65536", ":1", "::1", "fe80::1:50051"])
def test_what_is_no_address(address: str) -> None:
    """Told when the client is made, by its own name."""
    with pytest.raises(ValueError, match=r"expected|brackets"):
        split(address)


@pytest.mark.parametrize("target", ["", " , ", []])
def test_no_address(target: Any) -> None:
    """An empty list is a mistake, not a default."""
    with pytest.raises(ValueError, match="no address"):
        Connection(target)


@pytest.mark.parametrize(
    ("addresses", "target"),
    [
        (["host"], "dns:///host:50051"),
        (["10.0.0.1"], "ipv4:10.0.0.1:50051"),
        (["10.0.0.1", "10.0.0.2:7"], "ipv4:10.0.0.1:50051,10.0.0.2:7"),
        (["10.0.0.1", "10.0.0.1"], "ipv4:10.0.0.1:50051"),
        (["[::1]:1", "[::2]:2"], "ipv6:[::1]:1,[::2]:2"),
        (["unix:/run/x.sock"], "unix:/run/x.sock"),
        (["dns:///a:1"], "dns:///a:1"),
        (["xds:///fleet"], "xds:///fleet"),
    ],
)
def test_targets(addresses: list[str], target: str) -> None:
    """One name is left to gRPC, which looks it up again; several addresses are one target."""
    assert to_target(addresses) == target


def test_names_among_several_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All by IPv4 if that can be, else all by IPv6: no target holds both."""
    known = {
        ("a", socket.AF_INET): ["1.1.1.1", "1.1.1.2"],
        ("b", socket.AF_INET): ["2.2.2.2"],
        ("b", socket.AF_INET6): ["::2"],
        ("c", socket.AF_INET6): ["::3"],
    }

    def look_up(host: str, port: int, family: int, kind: int) -> list[Any]:
        if (host, family) not in known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, kind, 6, "", (ip, port)) for ip in known[host, socket.AddressFamily(family)]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert to_target(["a:1", "b:2"]) == "ipv4:1.1.1.1:1,1.1.1.2:1,2.2.2.2:2"
    assert to_target(["b:2", "c:3"]) == "ipv6:[::2]:2,[::3]:3"
    with pytest.raises(ValueError, match="IPv4"):
        to_target(["a:1", "c:3"])
    with pytest.raises(ValueError, match="alone"):
        to_target(["unix:/x", "b:2"])


@pytest.mark.parametrize(
    ("target", "is_balanced"),
    [
        ("10.0.0.1", False),
        ("localhost:1", False),
        ("unix:/x", False),
        ("10.0.0.1,10.0.0.2", True),
        ("emberline.internal", True),
        ("dns:///emberline.internal", True),
    ],
)
def test_health_is_watched_where_there_may_be_another_server(target: str, is_balanced: bool) -> None:
    """A single server's own answer says more than its absence; and whoever knows better says so."""
    assert Connection(target).is_balanced() is is_balanced
    assert Connection(target, health_check=not is_balanced).is_balanced() is not is_balanced


def test_the_service_config() -> None:
    """Retries of two codes and no others, round robin, health of the service that streams; 1 attempt is no policy."""
    config = json.loads(json.dumps(service_config(4, with_health=True)))
    (method,) = config["methodConfig"]
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
    assert method["retryPolicy"]["maxAttempts"] == 4
    assert config["healthCheckConfig"] == {"serviceName": "emberline.v1.InferenceService"}
    assert config["loadBalancingConfig"] == [{"round_robin": {}}]
    assert "retryPolicy" not in service_config(1, with_health=False)["methodConfig"][0]
    assert "healthCheckConfig" not in service_config(1, with_health=False)


@pytest.mark.parametrize("attempts", [0, ATTEMPTS_MAX + 1])
def test_attempts_are_what_grpc_allows(attempts: int) -> None:
    """gRPC would take 6 and make 5 of it without a word."""
    with pytest.raises(ValueError, match="attempts_max"):
        Connection(attempts_max=attempts)


def test_a_token_does_not_leave_the_machine_in_the_clear() -> None:
    """Not without TLS, unless somebody says that it may; on loopback it may. Its value is in no repr."""
    for target in ("10.0.0.1", "127.0.0.1,example.org", "dns:///x"):
        with pytest.raises(ValueError, match="clear"):
            Connection(target, token="secret")
    for connection in (
        Connection("127.0.0.1", token="secret"),
        Connection("localhost", token="secret"),
        Connection("unix:/x", token="secret"),
        Connection("10.0.0.1", token="secret", allow_plaintext_token=True),
        Connection("10.0.0.1", token="secret", tls=Tls()),
    ):
        assert connection.metadata() == (("authorization", "Bearer secret"),)
        assert "secret" not in repr(connection)


def test_a_token_may_change() -> None:
    """A function is asked before each call."""
    tokens = iter(["one", "two"])
    connection = Connection(token=lambda: next(tokens))
    assert [connection.metadata()[0][1] for _ in range(2)] == ["Bearer one", "Bearer two"]
    assert Connection().metadata() == ()


def test_tls_files(tmp_path: Path) -> None:
    """A certificate without its key is half a mistake; a file that is not there is told by name."""
    assert isinstance(Tls().credentials(), grpc.ChannelCredentials)
    with pytest.raises(ValueError, match="both"):
        Tls(cert_file=tmp_path / "c").credentials()
    with pytest.raises(OSError, match="missing"):
        Tls(ca_file=tmp_path / "missing").credentials()


def dialled(connection: Connection, *, for_inference: bool = True) -> tuple[str, dict[str, Any]]:
    found: dict[str, Any] = {}

    def make(target: str, *credentials: Any, options: list[tuple[str, Any]]) -> str:
        found.update(options)
        return target

    return connection.dial(make, make, for_inference=for_inference), found


def test_a_list_of_servers_has_one_name_for_tls() -> None:
    """The first host's, unless another is given: gRPC would look for the whole list in the certificate."""
    _, options = dialled(Connection("10.0.0.1,10.0.0.2", tls=Tls()))
    assert options["grpc.default_authority"] == options["grpc.ssl_target_name_override"] == "10.0.0.1"
    _, options = dialled(Connection("10.0.0.1,10.0.0.2", tls=Tls(), server_name="fleet"))
    assert options["grpc.default_authority"] == "fleet"
    _, options = dialled(Connection("host", tls=Tls()))
    assert "grpc.default_authority" not in options


def test_keepalive_is_what_the_server_tolerates() -> None:
    """Not more often than every 10 s; the caller's own options come last and win."""
    _, options = dialled(Connection(channel_options=[("grpc.keepalive_timeout_ms", 5)]))
    assert options["grpc.keepalive_time_ms"] >= 10_000
    assert options["grpc.keepalive_timeout_ms"] == 5


def test_only_inference_looks_at_health() -> None:
    """Load, state and health are asked for most when nothing serves."""
    connection = Connection("10.0.0.1,10.0.0.2")
    assert "healthCheckConfig" in dialled(connection)[1]["grpc.service_config"]
    assert "healthCheckConfig" not in dialled(connection, for_inference=False)[1]["grpc.service_config"]
