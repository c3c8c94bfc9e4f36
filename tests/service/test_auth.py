"""Tokens and scopes: the file, the decision, and the interceptors over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from emberline.v1 import admin_pb2, admin_pb2_grpc, info_pb2, info_pb2_grpc
from scheduler import logs
from scheduler.errors import ConfigurationError
from service import auth
from service.auth import AdminCertificates, Token, TokenAuth, authenticate, load_tokens
from service.errors import UnauthenticatedError
from service.status import safe_handlers
from tests.service.support import HANG_S, CapturedLogs


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# The file


def test_a_file_of_tokens(tmp_path: Path) -> None:
    """A line per token; comments, empty lines and any white space between; a name may be there twice."""
    path = write(
        tmp_path / "tokens",
        "# who calls",
        "",
        f"web   inference,info\t{digest('one')}   # until March",
        f"web   inference {digest('two').upper()}",
        f"on-call admin {digest('three')}",
    )
    first, second, third = load_tokens(path)
    assert (first.name, first.scopes) == ("web", {"inference", "info"})
    assert (second.name, second.digest) == ("web", bytes.fromhex(digest("two")))
    assert third.scopes == {"admin"}


BAD_LINES = {
    "the token itself": ("web inference s3cr3t-t0ken", "line 2: the third part must be the SHA-256"),
    "a digest too short": (f"web inference {digest('x')[:-2]}", "line 2: the third part"),
    "an unknown scope": (f"web inference,root {digest('x')}", "line 2: the scopes must be of"),
    "no scope": (f"web , {digest('x')}", "line 2: the scopes must be of"),
    "two parts": ("web s3cr3t-t0ken", "line 2: must be a name, its scopes"),
    "four parts": (f"my web inference {digest('x')}", "line 2: must be a name, its scopes"),
    "a long name": (f"{'w' * 65} inference {digest('x')}", "line 2: the name"),
    "the same token twice": (f"web inference {digest('first')}", "the same token is in it twice"),
    "no ASCII": (f"wéb inference {digest('x')}", "other characters than ASCII"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, what: str) -> None:
    """The one line names the line and holds nothing of it: a token may have been put there by mistake."""
    line, message = BAD_LINES[what]
    path = write(tmp_path / "tokens", f"first info {digest('first')}", line)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_tokens(path)
    assert "s3cr3t" not in str(caught.value)
    assert digest("x")[:16] not in str(caught.value)


def test_a_file_without_tokens_is_refused(tmp_path: Path) -> None:
    """Nobody could call; one that is not there or too large, too."""
    with pytest.raises(ConfigurationError, match="no token is in it"):
        load_tokens(write(tmp_path / "tokens", "# none"))
    with pytest.raises(ConfigurationError, match="No such file"):
        load_tokens(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="more than 1024 tokens"):
        load_tokens(write(tmp_path / "tokens", *(f"web info {digest(str(i))}" for i in range(1025))))


# The decision

TOKENS = tuple(
    Token(f"name-{i}", frozenset({"info"}), hashlib.sha256(f"token {i}".encode()).digest()) for i in range(64)
)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_right_token_is_found_wherever_it_stands(scheme: str) -> None:
    """Each token of the file authenticates its own caller; the scheme's case does not matter."""
    for i in (0, 31, 63):
        metadata = [("user-agent", "x"), ("authorization", f"{scheme} token {i}")]
        assert authenticate(TOKENS, metadata).name == f"name-{i}"


REFUSED: dict[str, list[tuple[str, str | bytes]]] = {
    "nothing": [],
    "an unknown one": [("authorization", "Bearer token 64")],
    "another scheme": [("authorization", "Basic token 1")],
    "no scheme": [("authorization", "token 1")],
    "an empty one": [("authorization", "Bearer ")],
    "the digest": [("authorization", f"Bearer {TOKENS[0].digest.hex()}")],
    "two of them": [("authorization", "Bearer token 1"), ("authorization", "Bearer token 2")],
    "binary": [("authorization-bin", b"Bearer token 1")],
    "a long one": [("authorization", "Bearer " + "t" * 5000)],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_token_is_refused(what: str) -> None:
    """Each in the same way."""
    with pytest.raises(UnauthenticatedError):
        authenticate(TOKENS, REFUSED[what])


@given(st.text())
def test_no_text_passes_for_a_token(text: str) -> None:
    """Whatever is sent, it is a known token or UnauthenticatedError."""
    with pytest.raises(UnauthenticatedError):
        authenticate(TOKENS, [("authorization", text)])
    with pytest.raises(UnauthenticatedError):
        authenticate(TOKENS, [("authorization", f"Bearer token 1{text}x")])


def test_every_token_is_compared_whichever_is_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is the constant-time one, of digests, and has no early end."""
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return real(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for i in (0, 63):
        seen.clear()
        authenticate(TOKENS, [("authorization", f"Bearer token {i}")])
        assert [a for a, _ in seen] == [token.digest for token in TOKENS]
        assert {b for _, b in seen} == {TOKENS[i].digest}


def test_every_service_that_is_offered_has_a_scope() -> None:
    """Of our own protocol each, and of what else the server registers."""
    from emberline.v1 import inference_pb2, tokenizer_pb2  # noqa: PLC0415 - only their names are wanted

    for module in (admin_pb2, inference_pb2, info_pb2, tokenizer_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert auth.SERVICE_SCOPES[service.full_name] in auth.SCOPES
    assert [name for name, scope in auth.SERVICE_SCOPES.items() if scope is None] == ["grpc.health.v1.Health"]


# The interceptors


class Servicer:
    """Answers everything, and notes who called what."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def GetServerInfo(self, message: Any, context: Any) -> info_pb2.GetServerInfoResponse:  # noqa: N802
        self.calls.append("GetServerInfo")
        logs.get_logger().info("called")
        return info_pb2.GetServerInfoResponse()

    async def Drain(self, message: Any, context: Any) -> admin_pb2.DrainResponse:  # noqa: N802
        self.calls.append("Drain")
        return admin_pb2.DrainResponse()

    async def Check(self, message: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        return health_pb2.HealthCheckResponse()

    def __getattr__(self, name: str) -> Any:
        return self.Check


class Door:
    def __init__(self, servicer: Servicer, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.channel = channel

    async def outcome(self, stub: Any, message: Any, token: str | None = None) -> str:
        """Of one call: the code's name, and the reason and scope where it was refused."""
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        try:
            await stub(message, metadata=metadata, timeout=HANG_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    async def info(self, token: str | None = None) -> str:
        stub = info_pb2_grpc.InfoServiceStub(self.channel).GetServerInfo
        return await self.outcome(stub, info_pb2.GetServerInfoRequest(), token)

    async def drain(self, token: str | None = None) -> str:
        return await self.outcome(admin_pb2_grpc.AdminServiceStub(self.channel).Drain, admin_pb2.DrainRequest(), token)

    async def check(self) -> str:
        return await self.outcome(health_pb2_grpc.HealthStub(self.channel).Check, health_pb2.HealthCheckRequest())


@asynccontextmanager
async def door(interceptor: grpc.aio.ServerInterceptor) -> AsyncIterator[Door]:
    server = grpc.aio.server(interceptors=[interceptor])
    servicer = Servicer()

    def no_bugs(incident_id: str, error: Exception) -> None:
        raise error

    for descriptor in (info_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR):
        for service in descriptor.services_by_name.values():
            server.add_generic_rpc_handlers((safe_handlers(service, servicer, no_bugs),))
    unlisted = grpc.unary_unary_rpc_method_handler(servicer.Check)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("some.New", {"Method": unlisted}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Door(servicer, channel)
    finally:
        await server.stop(None)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens", f"reader info {digest('r')}", f"chief admin {digest('a')}")


async def test_scopes_open_their_own_services_alone(token_file: Path) -> None:
    """Health needs no token; admin does not imply info, nor the other way round; nothing reaches the servicer of who is
    refused.
    """
    async with door(TokenAuth(token_file)) as entry:
        assert await entry.check() == "OK"
        assert await entry.info() == await entry.drain() == "UNAUTHENTICATED"
        assert await entry.info("unknown") == "UNAUTHENTICATED"
        assert await entry.info("a") == await entry.drain("r") == "PERMISSION_DENIED"
        assert entry.servicer.calls == []
        assert await entry.info("r") == await entry.drain("a") == "OK"


async def test_what_no_scope_is_known_for_is_closed(token_file: Path) -> None:
    """A service that somebody adds and forgets here is served to nobody; a method that nobody has is UNIMPLEMENTED,
    but only to who may call at all.
    """
    async with door(TokenAuth(token_file)) as entry:
        forgotten, missing = (
            entry.channel.unary_unary(path) for path in ("/some.New/Method", "/emberline.v1.InfoService/Nothing")
        )
        assert await entry.outcome(forgotten, b"", "a") == "PERMISSION_DENIED"
        assert await entry.outcome(missing, b"", "r") == "UNIMPLEMENTED"
        assert await entry.outcome(missing, b"") == "UNAUTHENTICATED"


async def test_a_refusal_does_not_wait_for_the_request(token_file: Path) -> None:
    """The status comes though no message was sent: nothing of it is read."""
    async with door(TokenAuth(token_file)) as entry:
        call = entry.channel.stream_unary("/emberline.v1.InfoService/GetServerInfo")(timeout=HANG_S)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_change_without_a_restart(token_file: Path, log: CapturedLogs) -> None:
    """A new token works and a removed one does not from the next call on; a file that is no good changes nothing."""
    interceptor = TokenAuth(token_file)
    assert interceptor.has_scope("admin")
    async with door(interceptor) as entry:
        write(token_file, "garbage")
        interceptor.poll()
        assert await entry.info("r") == "OK"
        write(token_file, f"reader info {digest('new')}")
        interceptor.poll()
        assert await entry.info("new") == "OK"
        assert await entry.info("r") == await entry.drain("a") == "UNAUTHENTICATED"
    assert not interceptor.has_scope("admin")
    assert log.of("auth tokens reloaded")[0]["num_tokens"] == 1
    assert len(log.of("auth tokens not reloaded")) == 1


async def test_lines_of_a_call_name_its_client_and_never_the_token(tmp_path: Path, log: CapturedLogs) -> None:
    """The token's name is on what is logged for the call, and on no other call's lines."""
    path = write(tmp_path / "tokens", f"one info {digest('canary-one')}", f"two info {digest('canary-two')}")
    async with door(TokenAuth(path)) as entry:
        await asyncio.gather(*(entry.info(f"canary-{name}") for name in ("one", "two", "one")))
        await entry.info("canary-three")
    assert sorted(record["client"] for record in log.of("called")) == ["one", "one", "two"]
    assert "canary" not in log.text


async def test_refusals_are_told_once_a_minute(token_file: Path, log: CapturedLogs) -> None:
    """The first at once, then how many there were: whoever guesses tokens does not fill the log."""
    now_s = 1000.0
    async with door(TokenAuth(token_file, lambda: now_s)) as entry:
        for _ in range(50):
            await entry.info("guess")
        assert [record["num_unauthenticated"] for record in log.of("calls refused")] == [1]
        now_s += 61
        await entry.drain("r")
    last = log.of("calls refused")[-1]
    assert (last["num_unauthenticated"], last["num_permission_denied"]) == (49, 1)


async def test_without_a_certificate_of_an_administrator_there_is_no_admin_service() -> None:
    """Who has no certificate at all is refused it, and nothing else. (With certificates: `e2e/test_security.py`.)"""
    async with door(AdminCertificates(["ops.test"])) as entry:
        assert await entry.drain() == "PERMISSION_DENIED"
        assert entry.servicer.calls == []
        assert await entry.info() == await entry.check() == "OK"
