"""A server with all its doors closed: client certificates, tokens, administrators by name, and certificates that change
while calls come in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from tests.certificates import Authority, Pair
from tests.e2e import tiny_model
from tests.e2e.harness import CHANNEL_OPTIONS, INFERENCE, Health, ReflectionClient, Server, Status
from tests.e2e.secrets import Mount, credentials, token_line

TOKENS = {"caller": "caller-token", "watcher": "watcher-token", "chief": "chief-token"}
TOKEN_FILE = (
    token_line("caller", "inference", TOKENS["caller"])
    + token_line("watcher", "info", TOKENS["watcher"])
    + token_line("chief", "inference,info,admin", TOKENS["chief"])
)
HANG_S = 60.0
GREEDY = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 3}}


@dataclass
class Guarded:
    """The server, and what opens it."""

    server: Server
    mount: Mount
    authority: Authority
    server_pair: Pair

    def put(self, pair: Pair, client_ca: bytes) -> None:
        self.mount.put(cert=pair.chain, key=pair.key, client_ca=client_ca, tokens=TOKEN_FILE.encode())

    def client(
        self, name: str | None, token: str | None = None, authority: Authority | None = None
    ) -> ReflectionClient:
        """A caller whose certificate has this name (None: it has none) and that sends this token."""
        issuer = authority or self.authority
        pair = None if name is None else issuer.client(name)
        secret = None if token is None else TOKENS.get(token, token)
        return ReflectionClient(self.server.address, credentials=credentials(self.authority.pem, pair, secret))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Everything at once: mutual TLS, tokens, administrators by name, health in plaintext."""
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority()
    mount, pair = Mount(folder / "secrets"), authority.server()
    mount.put(cert=pair.chain, key=pair.key, client_ca=authority.pem, tokens=TOKEN_FILE.encode())
    flags: dict[str, Any] = {
        "model": tiny_model.make(folder / "model"),
        "tls_cert": mount.path("cert"),
        "tls_key": mount.path("key"),
        "tls_client_ca": mount.path("client_ca"),
        "auth_tokens": mount.path("tokens"),
        "health_port": 0,
        "enable_admin": True,
        "admin_clients": "ops.test",
    }
    with Server(**flags) as server:
        yield Guarded(server, mount, authority, pair)


def code_of(call: Callable[[], Any]) -> str:
    """How a call ends: its code's name."""
    try:
        call()
    except grpc.RpcError as error:
        return Status.of(error).code.name
    return "OK"


def test_who_has_no_certificate_of_the_authority_is_not_let_in(guarded: Guarded) -> None:
    """Without TLS, without a certificate, with another authority's: no connection. With its own: served."""
    right = guarded.client("web.test", "chief")
    assert right.generate(text="a", **GREEDY).expect_ok().text is not None
    strangers = [
        guarded.client(None, "chief"),
        guarded.client("web.test", "chief", authority=Authority()),
        ReflectionClient(guarded.server.address),
    ]
    for stranger in strangers:
        assert code_of(stranger.health.check) == "UNAVAILABLE"
        stranger.close()
    right.close()


def test_each_token_opens_its_own_services(guarded: Guarded) -> None:
    """Inference, info (and reflection) and admin, each by its scope alone; health is open to any; a refusal says which
    scope it wants, and nothing else.
    """
    with guarded.client("ops.test", "chief") as chief:
        request = {path: chief.request(path) for path in ("InfoService/GetLoad", "AdminService/Abort")}
        request[f"{INFERENCE}/Complete"] = chief.request(f"{INFERENCE}/Complete", text="a", **GREEDY)
        request["TokenizerService/Tokenize"] = chief.request("TokenizerService/Tokenize", text="a")

        def outcomes(token: str | None) -> dict[str, str]:
            with guarded.client("ops.test", token) as caller:
                assert caller.health.check("readiness") == "SERVING"
                return {
                    path.rpartition("/")[2]: code_of(
                        lambda path=path, message=message: chief.stub(path, caller.channel)(message, timeout=HANG_S)
                    )
                    for path, message in request.items()
                }

        denied, invalid = "PERMISSION_DENIED", "INVALID_ARGUMENT"
        assert outcomes("caller") == {"GetLoad": denied, "Abort": denied, "Complete": "OK", "Tokenize": "OK"}
        assert outcomes("watcher") == {"GetLoad": "OK", "Abort": denied, "Complete": denied, "Tokenize": denied}
        assert outcomes("chief") == {"GetLoad": "OK", "Abort": invalid, "Complete": "OK", "Tokenize": "OK"}
        for nobody in (None, "unknown", ""):
            assert set(outcomes(nobody).values()) == {"UNAUTHENTICATED"}
        with guarded.client("web.test", "watcher") as watcher:
            path = f"{INFERENCE}/Complete"
            with pytest.raises(grpc.RpcError) as caught:
                chief.stub(path, watcher.channel)(request[path], timeout=HANG_S)
            status = Status.of(caught.value)
            assert (status.reason, status.metadata) == ("SCOPE_MISSING", {"scope": "inference"})
            assert "emberline.v1.InferenceService" in watcher.services()
    assert not any(token in guarded.server.raw_stderr for token in TOKENS.values())


def test_an_administrator_needs_the_token_and_the_name(guarded: Guarded) -> None:
    """The right token with another's certificate is refused AdminService, as is the right certificate without it."""
    with guarded.client("ops.test", "chief") as chief:
        abort, request = "AdminService/Abort", {"request_ids": ["nobody"]}
        (result,) = chief.call(abort, **request).results
        assert (result.request_id, result.aborted) == ("nobody", False)
        message = chief.request(abort, **request)
        for name, token in (("web.test", "chief"), ("ops.test", "caller")):
            with guarded.client(name, token) as other:
                stub = chief.stub(abort, other.channel)
                assert code_of(lambda stub=stub: stub(message, timeout=HANG_S)) == "PERMISSION_DENIED"
        live = chief.stream(text="a", request_id="mine", stopping={"max_tokens": 2000, "ignore_eos": True})
        next(live)
        (result,) = chief.call(abort, request_ids=["mine"]).results
        assert result.aborted
        wait_until(lambda: any(act["num_aborted"] for act in guarded.server.events("aborted by an administrator")))
        acts = guarded.server.events("aborted by an administrator")
        assert {(act["client"], act["administrator"]) for act in acts} == {("chief", "ops.test")}
        assert code_of(lambda: list(live)) == "ABORTED"


def test_probes_need_neither_certificate_nor_token(guarded: Guarded) -> None:
    """The health port is plaintext, tells what the main port tells, and offers nothing else."""
    (serving,) = guarded.server.events("serving")
    assert (serving["tls"], serving["auth"], serving["admin"]) == ("mutual", "tokens", True)
    with grpc.insecure_channel(serving["health_address"], options=CHANNEL_OPTIONS) as channel:
        told = Health(channel).list()
        assert {"", "readiness", "liveness", INFERENCE} <= set(told)
        with guarded.client("web.test") as caller:
            assert told == caller.health.list()
        call = channel.unary_unary("/emberline.v1.InfoService/GetLoad")
        assert code_of(lambda: call(b"", timeout=HANG_S)) == "UNIMPLEMENTED"


# Rotation


class Callers:
    """Threads that call without a pause, each call on a connection of its own, with what is trusted at the moment."""

    def __init__(self, address: str, calls: dict[str, bytes], num_threads: int = 2) -> None:
        """`calls`: requests by their methods' paths, made in turn."""
        self._address = address
        self._calls = list(calls.items())
        self._changed = threading.Condition()
        self._trusted = b""
        self._pairs: list[Pair] = []
        self._num_calls = [0] * num_threads
        self._is_over = False
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(num_threads)]

    @property
    def num_calls(self) -> int:
        return sum(self._num_calls)

    def use(self, trusted: bytes, *pairs: Pair) -> None:
        """From now on; returns once every thread has made two calls that began after it."""
        with self._changed:
            self._trusted, self._pairs = trusted, list(pairs)
            begun = list(self._num_calls)
            if self._threads[0].ident is None:
                for thread in self._threads:
                    thread.start()
            done = self._changed.wait_for(
                lambda: all(now >= before + 3 for now, before in zip(self._num_calls, begun, strict=True)), HANG_S
            )
        assert done, "callers do not get on"

    def stop(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(HANG_S)

    def _run(self, index: int) -> None:
        while not self._is_over:
            with self._changed:
                pair = self._pairs[self._num_calls[index] % len(self._pairs)]
                path, request = self._calls[self._num_calls[index] // 2 % len(self._calls)]
                chosen = credentials(self._trusted, pair, TOKENS["chief"])
            with grpc.secure_channel(self._address, chosen, options=CHANNEL_OPTIONS) as channel:
                try:
                    channel.unary_unary(path)(request, timeout=HANG_S)
                except grpc.RpcError as error:
                    self.failures.append(str(Status.of(error)))
            with self._changed:
                self._num_calls[index] += 1
                self._changed.notify_all()
            time.sleep(0.005)  # the server has a share of the two cores, too


def test_certificates_and_authorities_are_rotated_without_a_failed_call(guarded: Guarded) -> None:
    """Server certificate, key and client authorities are replaced twice under calls that never pause, by the swap of a
    link and in the order that every such rotation has: trust both, change over, trust the new one. Files that do not
    belong together in between change nothing. No call fails; the old ones' clients are out in the end; what was
    connected all along, still is.
    """
    server, old, pair = guarded.server, guarded.authority, guarded.server_pair
    num_reloads = len(server.events("certificates reloaded"))

    def put(new_pair: Pair, client_ca: bytes) -> None:
        nonlocal num_reloads
        guarded.put(new_pair, client_ca)
        num_reloads += 1
        wait_until(lambda: len(server.events("certificates reloaded")) == num_reloads)

    connected = guarded.client("web.test", "chief")
    complete = connected.request(f"{INFERENCE}/Complete", text="Once", **GREEDY)
    calls = {f"/{INFERENCE}/Complete": complete.SerializeToString(), "/emberline.v1.InfoService/GetLoad": b""}
    callers = Callers(server.address, calls)
    with connected.health.watch() as watch:
        watch.wait_for("SERVING")
        client = old.client("web.test")
        callers.use(old.pem, client)
        try:
            for _ in range(2):
                new = Authority()
                new_pair, new_client = new.server(), new.client("web.test")
                put(pair, old.pem + new.pem)
                callers.use(old.pem + new.pem, client, new_client)
                num_refused = len(server.events("certificates not reloaded"))
                guarded.put(Pair(new_pair.chain, pair.key), old.pem + new.pem)
                wait_until(lambda before=num_refused: len(server.events("certificates not reloaded")) == before + 1)
                callers.use(old.pem + new.pem, client, new_client)
                put(new_pair, old.pem + new.pem)
                callers.use(new.pem, new_client)
                put(new_pair, new.pem)
                callers.use(new.pem, new_client)
                withdrawn = ReflectionClient(server.address, credentials=credentials(new.pem, client))
                assert code_of(withdrawn.health.check) == "UNAVAILABLE"
                withdrawn.close()
                guarded.authority, guarded.server_pair = new, new_pair
                old, pair, client = new, new_pair, new_client
        finally:
            callers.stop()
        assert callers.failures == []
        assert callers.num_calls > 20
        assert connected.health.check() == "SERVING"
        assert watch.states == ["SERVING"]
        assert watch.status is None
    connected.close()
    print(f"rotation: {callers.num_calls} calls, {num_reloads} reloads, 0 failures")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Starting


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached by others"),
        ({"host": "0.0.0.0", "allow_plaintext_network": True, "enable_admin": True}, "--enable-admin on --host"),
    ],
)
def test_a_door_that_would_stand_open_is_refused_at_the_start(flags: dict[str, Any], line: str) -> None:
    """Exit 2 and one line, at once."""
    server = Server(**flags)
    server.spawn()
    try:
        assert server.wait() == 2
        (said,) = server.raw_stderr.splitlines()
        assert line in said
    finally:
        server.kill()
