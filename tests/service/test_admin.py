"""Administration and the doors, over real gRPC and with a fake engine behind them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from emberline.v1 import admin_pb2, admin_pb2_grpc, info_pb2, info_pb2_grpc
from service.auth import SERVICE_SCOPES
from service.cli import build_parser
from service.config import parse
from service.convert import ABORT_IDS_MAX
from service.exit import ExitCode
from service.health import NAME_CHARS_MAX
from service.server import Server
from tests.certificates import Authority, Pair, write
from tests.service.fake_engine import Trigger
from tests.service.front_end import Running, details, error_of, request, rest_of, running
from tests.service.support import HANG_S, CapturedLogs, fake_engine, until
from tests.service.test_auth import digest

ENDLESS = 4000
SLOW = fake_engine(step_s=0.02)


def admin(run: Running) -> Any:
    return admin_pb2_grpc.AdminServiceStub(run.channel)


async def abort(run: Running, *labels: str) -> list[tuple[str, bool]]:
    response = await admin(run).Abort(admin_pb2.AbortRequest(request_ids=labels), timeout=HANG_S)
    return [(result.request_id, result.aborted) for result in response.results]


async def live(run: Running, label: str) -> Any:
    """A stream that has begun and has long to go."""
    call = run.generate(1, 2, max_tokens=ENDLESS, request_id=label)
    await call.read()
    return call


@contextmanager
def held_tokenizer(run: Running) -> Iterator[asyncio.Event]:
    """Prompts are prepared only once the block is left; the event is set when the first one is in."""
    tokenizer, release = run.server._backend.tokenizer, threading.Event()
    assert tokenizer is not None
    loop, entered = asyncio.get_running_loop(), asyncio.Event()
    encode = tokenizer.encode

    def held(prompt: Any) -> Any:
        loop.call_soon_threadsafe(entered.set)
        assert release.wait(HANG_S)
        return encode(prompt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "encode", lambda _self, prompt: held(prompt))
        try:
            yield entered
        finally:
            release.set()


# Abort


async def test_an_aborted_request_is_told_and_its_neighbours_are_not(model: Path, log: CapturedLogs) -> None:
    """ABORTED to its caller, a result per id in order, the engine rid of it; others run on. Again, it is unknown."""
    async with running(model, "--enable-admin", engine=SLOW) as run:
        calls = {label: await live(run, label) for label in ("one", "two", "three")}
        assert await abort(run, "nobody", "two", "one", "two") == [
            ("nobody", False),
            ("two", True),
            ("one", True),
            ("two", True),
        ]
        for label in ("one", "two"):
            error = await error_of(calls[label])
            assert error.code() is grpc.StatusCode.ABORTED
            assert details(error) == ("ABORTED_BY_ADMINISTRATOR", {}, None)
        assert await calls["three"].read() is not grpc.aio.EOF
        assert await abort(run, "one", "two") == [("one", False), ("two", False)]
        calls["three"].cancel()
        await run.wait_idle()
    acts = log.of("aborted by an administrator")
    assert [(act["num_given"], act["num_aborted"]) for act in acts] == [(4, 2), (2, 0)]
    assert not log.of("fatal error")


async def test_a_request_that_no_engine_has_yet_can_be_aborted(model: Path) -> None:
    """While its prompt is being prepared, and while it waits for an engine to be."""
    async with running(model, "--enable-admin") as run:
        with held_tokenizer(run) as entered:
            call = run.generate(text="some text", request_id="prepared")
            await asyncio.wait_for(entered.wait(), HANG_S)
            assert await abort(run, "prepared") == [("prepared", True)]
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        await run.wait_idle()


async def test_a_request_that_is_replayed_can_be_aborted_while_it_waits(model: Path) -> None:
    """Between a death and the next engine it is in nobody's hands but the dispatcher's."""
    arguments = ("--enable-admin", "--max-engine-restarts", "3", "--on-engine-death", "replay")
    async with running(model, *arguments, engine=fake_engine(step_s=0.02, load_s=2)) as run:
        call = await live(run, "replayed")
        killer = run.generate(Trigger.SIGKILL.value, resume_on_engine_death=False)
        await error_of(killer)
        assert await abort(run, "replayed") == [("replayed", True)]
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        await run.wait_serving()
        await run.wait_idle()


BAD_IDS: dict[str, tuple[list[str], str]] = {
    "none": ([], "request_ids"),
    "too many": (["x"] * (ABORT_IDS_MAX + 1), "request_ids"),
    "an empty one": (["x", ""], "request_ids[1]"),
    "a long one": (["x" * 129], "request_ids[0]"),
}


async def test_ids_are_held_to_the_bounds_of_labels(model: Path) -> None:
    """Their number and each one's length: INVALID_ARGUMENT names which, and nothing is aborted."""
    async with running(model, "--enable-admin", engine=SLOW) as run:
        call = await live(run, "x")
        for labels, field in BAD_IDS.values():
            error = await error_of(admin(run).Abort(admin_pb2.AbortRequest(request_ids=labels)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{field}:" in error.details()
        assert await call.read() is not grpc.aio.EOF
        assert len(await abort(run, *["y"] * ABORT_IDS_MAX)) == ABORT_IDS_MAX


# Drain


async def drain(run: Running, grace_s: float | None = None) -> int:
    message = admin_pb2.DrainRequest()
    if grace_s is not None:
        message.grace.CopyFrom(Duration(seconds=int(grace_s), nanos=int(grace_s % 1 * 1e9)))
    response = await admin(run).Drain(message, timeout=HANG_S)
    return int(response.live_requests)


async def test_drain_is_what_a_stop_signal_is(model: Path, log: CapturedLogs) -> None:
    """It answers at once with what lives; new calls are told DRAINING from that very moment, the live one ends as it
    would have, and the process ends by itself with 0. A signal that comes then is the first one: it cuts nothing.
    """
    async with running(model, "--enable-admin", engine=fake_engine(step_s=0.02)) as run:
        call = run.generate(1, 2, max_tokens=60)
        await call.read()
        assert await drain(run) == 1
        assert await run.readiness() == "NOT_SERVING"
        assert details(await error_of(run.generate(1)))[0] == "DRAINING"
        run.server.request_stop()  # Kubernetes: Drain as preStop hook, then SIGTERM
        deltas = await rest_of(call)
        assert deltas[-1].HasField("finish")
        assert await run.exit_code() is ExitCode.CLEAN
    assert not log.of("streams cut at the end of the grace")


async def test_a_second_drain_can_only_shorten_the_grace(model: Path, log: CapturedLogs) -> None:
    """A longer one changes nothing; a shorter one cuts earlier, with a status that lets the caller retry elsewhere."""
    async with running(model, "--enable-admin", engine=SLOW) as run:
        call = await live(run, "long")
        assert await drain(run, 3600) == 1
        assert await drain(run, 7200) == 1
        left_s = run.server._drain_until_s - asyncio.get_running_loop().time()
        assert 3000 < left_s <= 3600
        assert await drain(run, 0) == 1
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details(error)[0] == "DRAINING"
        assert await run.exit_code() is ExitCode.CLEAN
    assert len(log.of("streams cut at the end of the grace")) == 1
    assert [act["grace_s"] for act in log.of("drain asked for by an administrator")] == [3600, 7200, 0]


async def test_a_grace_is_held_to_its_bounds(model: Path) -> None:
    """A negative, a malformed and an endless one are INVALID_ARGUMENT; the server serves on."""
    async with running(model, "--enable-admin") as run:
        for grace in (Duration(seconds=-1), Duration(nanos=-1), Duration(nanos=10**9), Duration(seconds=86401)):
            error = await error_of(admin(run).Drain(admin_pb2.DrainRequest(grace=grace)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "grace:" in error.details()
        assert await run.readiness() == "SERVING"


# The doors


async def test_health_has_the_same_answers_on_its_own_port(model: Path, log: CapturedLogs) -> None:
    """From before an engine is there until the end; nothing else is offered there, not even reflection, and a lost port
    is opened anew.
    """
    engine = fake_engine(load_s=1)
    async with running(model, "--health-port", "0", engine=engine, wait=False) as run:
        address = run.server.health_address
        assert address not in (None, run.server.address)
        async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def status(name: str) -> int:
                response = await health.Check(
                    health_pb2.HealthCheckRequest(service=name), timeout=HANG_S, wait_for_ready=True
                )
                return int(response.status)

            assert await status("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            await run.wait_serving()
            assert await status("readiness") == await status("liveness") == health_pb2.HealthCheckResponse.SERVING
            info = info_pb2_grpc.InfoServiceStub(channel)
            assert (await error_of(info.GetLoad(info_pb2.GetLoadRequest()))).code() is grpc.StatusCode.UNIMPLEMENTED
            await run.server._listeners[1]._server.stop(None)
            await until(lambda: log.of("listener lost"))
            assert await status("readiness") == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=HANG_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            run.server.request_stop()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    (line,) = log.of("serving")
    assert line["health_address"] == address


async def test_health_holds_no_long_names(model: Path) -> None:
    """A watcher of an unknown name may stay for ever; its name must not be megabytes."""
    async with running(model) as run:
        name = "n" * NAME_CHARS_MAX
        assert (await run.health.Watch(health_pb2.HealthCheckRequest(service=name)).read()).status == 3
        for method in (run.health.Check, run.health.Watch):
            error = await error_of(method(health_pb2.HealthCheckRequest(service=name + "n")))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "service:" in error.details()


async def test_channelz_tells_the_connections(model: Path) -> None:
    """With its flag; without, the method is UNIMPLEMENTED and channelz keeps no counts."""
    async with running(model, "--enable-channelz") as run:
        channelz = channelz_pb2_grpc.ChannelzStub(run.channel)
        servers = (await channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=HANG_S)).server
        assert sum(server.data.calls_started for server in servers) >= 1
        requests = [channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id) for server in servers]
        sockets = [ref for one in requests for ref in (await channelz.GetServerSockets(one)).socket_ref]
        answer = await channelz.GetSocket(channelz_pb2.GetSocketRequest(socket_id=sockets[0].socket_id))
        assert answer.socket.data.streams_started >= 1
        error = await error_of(channelz.GetSocket(channelz_pb2.GetSocketRequest(socket_id=10**6)))
        assert error.code() is grpc.StatusCode.NOT_FOUND
    async with running(model) as run:
        channelz = channelz_pb2_grpc.ChannelzStub(run.channel)
        error = await error_of(channelz.GetServers(channelz_pb2.GetServersRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_whatever_is_offered_has_a_scope(model: Path) -> None:
    """With every flag that adds a service: what reflection lists is what tokens are asked for."""
    async with running(model, "--enable-admin", "--enable-channelz") as run:
        reflection = reflection_pb2_grpc.ServerReflectionStub(run.channel)
        call = reflection.ServerReflectionInfo(timeout=HANG_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        offered = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
    assert offered == set(SERVICE_SCOPES)


@pytest.mark.parametrize("flag", ["--enable-admin", "--enable-channelz"])
async def test_tokens_without_an_administrator_are_refused_with_the_flag(
    model: Path, tmp_path: Path, log: CapturedLogs, flag: str
) -> None:
    """A service that nobody may call is a mistake: exit 2, one line."""
    path = tmp_path / "tokens"
    path.write_text(f"reader info,inference {digest('r')}\n")
    assert await never_serves(model, flag, "--auth-tokens", str(path)) is ExitCode.CONFIGURATION
    (line,) = [record for record in log.records if record["level"] in ("error", "critical")]
    assert (line["event"], "scope admin" in line["reason"]) == ("configuration error", True)


async def test_certificates_that_are_no_good_are_refused_at_the_start(
    model: Path, tmp_path: Path, log: CapturedLogs
) -> None:
    """Exit 2 and one line, before a port is bound or a process started."""
    authority = Authority()
    pair = Pair(authority.server().chain, authority.server().key)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in write(tmp_path, pair).items()]
    assert await never_serves(model, *flags) is ExitCode.CONFIGURATION
    (line,) = log.records
    assert line["event"] == "configuration error"
    assert "does not belong to the certificate" in line["reason"]


async def never_serves(model: Path, *arguments: str) -> ExitCode:
    flags = ["serve", "--model", str(model), "--port", "0", "--crash-dir", str(model.parent / "crashes"), *arguments]
    server = Server(parse(build_parser().parse_args(flags), {}), engine_command=fake_engine())
    return await asyncio.wait_for(server.run(), HANG_S)


async def test_metadata_has_a_bound_of_its_own(model: Path) -> None:
    """gRPC's: a call with more is RESOURCE_EXHAUSTED, and the next one is served."""
    async with running(model) as run:
        metadata = [("x-large", "m" * 64 * 1024)]
        error = await error_of(run.inference.Generate(request(1), metadata=metadata, timeout=HANG_S))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [delta async for delta in run.generate(1)]
