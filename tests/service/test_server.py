"""The order in which a server begins and ends, over real gRPC and with a fake engine behind it."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from emberline.v1 import inference_pb2, inference_pb2_grpc, info_pb2, info_pb2_grpc, tokenizer_pb2
from service.cli import build_parser
from service.config import parse
from service.exit import ExitCode
from service.server import Server, _report_loop_error
from tests.service import tiny_tokenizers
from tests.service.fake_engine import Trigger
from tests.service.front_end import CANARY, details, error_of, request, rest_of, running
from tests.service.support import HANG_S, CapturedLogs, fake_engine, until


async def test_calls_while_starting_are_told_and_retried_by_the_client_library(model: Path, log: CapturedLogs) -> None:
    """Before an engine is ready a call is told ENGINE_STARTING with pushback, in trailers only: a client library with a
    retry policy waits that long and is then served. Tokenize works meanwhile."""
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s",'
        '"maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    async with running(model, engine=fake_engine(load_s=1.5), wait=False) as run:
        error = await error_of(run.generate(1))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        reason, _, pushback = details(error)
        assert reason == "ENGINE_STARTING"
        assert int(pushback or 0) > 0
        assert await run.readiness() == "NOT_SERVING"
        assert await run.readiness("liveness") == "SERVING"
        await until(lambda: run.server._backend.tokenizer is not None)
        answer = await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="the"))
        assert len(answer.ids) == 1
        assert not log.of("serving")
        options = [("grpc.service_config", policy), ("grpc.enable_retries", 1)]
        async with grpc.aio.insecure_channel(run.server.address, options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert [delta async for delta in stub.Generate(request(1), timeout=HANG_S)]
    (line,) = log.of("serving")
    assert line["address"] == run.server.address


async def test_ends_of_sequence_that_the_model_lacks_are_told_and_left_out(tmp_path: Path, log: CapturedLogs) -> None:
    """One warning at the start; GetModelInfo tells the others."""
    directory = tiny_tokenizers.write_model(
        tmp_path / "m", tiny_tokenizers.byte_level(), config={"eos_token_id": [150, 1000, 5000]}
    )
    async with running(directory) as run:
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        assert list(info.eos_token_ids) == [150]
        assert [delta async for delta in run.generate(1)]
    (warning,) = log.of("eos token ids beyond the vocabulary")
    assert (warning["ids"], warning["vocab_size"]) == ([1000, 5000], 1000)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_refuses_what_it_cannot_read(model: Path, log: CapturedLogs, version: str) -> None:
    """Bad UTF-8 is INVALID_ARGUMENT in our own words, and no line of the log."""
    async with running(model) as run:
        call = run.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")()
        await call.write(b"\x22\x01\xff")
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in (error.details() or "")
        assert not [record for record in log.records if record["level"] == "error"]


async def test_what_the_loop_reports_is_logged_with_its_words(log: CapturedLogs) -> None:
    """asyncio's own message says what failed; the exception's text is not told."""
    loop = asyncio.get_running_loop()
    _report_loop_error(loop, {"message": "Task was destroyed but it is pending!"})
    _report_loop_error(loop, {"message": "Exception in callback", "exception": KeyError(CANARY)})
    spurious = {
        "message": "Exception in callback PollerCompletionQueue._handle_events()",
        "exception": BlockingIOError(),
    }
    _report_loop_error(loop, spurious)  # gRPC's poller woken for nothing: known, and harmless
    assert [record["level"] for record in log.of("internal error")] == ["error", "error", "debug"]
    first, second, _ = log.of("internal error")
    assert first["message"] == "Task was destroyed but it is pending!"
    assert (second["message"], second["exception_type"]) == ("Exception in callback", "builtins.KeyError")
    assert CANARY not in log.text


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_every_service(model: Path, log: CapturedLogs, version: str) -> None:
    """Under both names, reflection lists all services and has the files of each, its own included."""
    async with running(model, wait=False) as run:
        ask = run.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in (await call.read()).list_services_response.service]
        assert {"emberline.v1.InferenceService", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"} <= {
            *names
        }
        for name in names:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()


async def test_a_busy_port_fails_before_anything_loads(model: Path, log: CapturedLogs, tmp_path: Path) -> None:
    """A port that is taken ends the process with 3, one line that says so, and no engine."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ["serve", "--model", str(model), "--port", str(port), "--termination-log", str(tmp_path / "t")]
        server = Server(parse(build_parser().parse_args(arguments), {}), engine_command=fake_engine())
        assert await server.run() is ExitCode.COULD_NOT_START
    (line,) = log.of("could not start")
    assert f"127.0.0.1:{port}" in line["reason"]
    assert "in use" in (tmp_path / "t").read_text()
    assert not log.of("engine starting")


@pytest.mark.parametrize(
    ("fail_with", "code", "event"),
    [
        ("ModelUnsupportedError:mamba is recurrent", ExitCode.CONFIGURATION, "configuration error"),
        ("StartupError:no weights", ExitCode.COULD_NOT_START, "could not start"),
        ("OddError:odd", ExitCode.COULD_NOT_START, "could not start"),
    ],
)
async def test_an_engine_that_cannot_start_ends_the_process(
    model: Path, log: CapturedLogs, tmp_path: Path, fail_with: str, code: ExitCode, event: str
) -> None:
    """A configuration the engine refuses is 2, anything else 3, with the engine's reason in one line."""
    path = tmp_path / "t"
    async with running(
        model, "--termination-log", str(path), engine=fake_engine(fail_with=fail_with), wait=False
    ) as run:
        assert await run.exit_code() is code
    (line,) = log.of(event)
    assert fail_with.partition(":")[2] in line["reason"]
    assert path.exists() == (code is ExitCode.COULD_NOT_START)


# ------------------------------------------------------------------------------------------------------ death, drain


@pytest.mark.parametrize("num_streams", [3, 93])
async def test_a_death_is_told_to_all_and_ends_the_process(
    model: Path, log: CapturedLogs, tmp_path: Path, num_streams: int
) -> None:
    """Every stream ends UNAVAILABLE with ENGINE_DEAD, one death_id and pushback −1, a watcher sees NOT_SERVING, the
    exit code is 4 even after a late stop signal, the log has one `fatal error` and is as long for 3 streams as for 93,
    and no word of a prompt is in it."""
    path = tmp_path / "t"
    async with running(model, "--termination-log", str(path)) as run:
        watch = run.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        calls = [run.generate(text=f"{CANARY} {n}", max_tokens=2000) for n in range(num_streams)]
        for call in calls:
            await call.read()
        calls.append(run.generate(Trigger.RAISE.value))
        errors = await asyncio.gather(*(error_of(call) for call in calls))
        run.server.request_stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await run.exit_code() is ExitCode.GAVE_UP
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    (record,) = log.of("fatal error")
    told = {(reason, metadata["death_id"], pushback) for reason, metadata, pushback in map(details, errors)}
    assert told == {("ENGINE_DEAD", record["death_id"], "-1")}
    assert record["num_streams_ended"] == num_streams + 1
    assert "the root cause" in path.read_text()
    records = [line for line in log.records if line["level"] != "debug"]
    assert len(records) <= 8
    assert CANARY not in log.text + "".join(map(str, errors))


async def test_new_calls_after_a_death_are_told_at_once(model: Path, log: CapturedLogs) -> None:
    """While the record is being completed, new calls get ENGINE_DEAD with a time to come back."""
    async with running(model) as run:
        call = run.generate(Trigger.CLOSE_SOCKET.value)
        await error_of(call)
        error = await error_of(run.generate(1))
        reason, _, pushback = details(error)
        assert (error.code(), reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
        assert int(pushback or 0) > 0
        error = await error_of(run.inference.Generate(inference_pb2.GenerateRequest()))  # not valid, but who cares now
        assert details(error)[0] == "ENGINE_DEAD"
        assert await run.readiness() == "NOT_SERVING"


async def test_a_drain_lets_streams_finish(model: Path, log: CapturedLogs) -> None:
    """After a stop signal live streams finish OK, new calls are told DRAINING with pushback, health says NOT_SERVING on
    a listener that still listens, an open Watch delays nothing, and the exit code is 0 without a `fatal error`."""
    async with running(model) as run:
        watch = run.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        await watch.read()
        calls = [run.generate(1, n, max_tokens=300) for n in range(20)]
        for call in calls:
            await call.read()
        run.server.request_stop()
        error = await error_of(run.generate(1))
        assert details(error)[0] == "DRAINING"
        async with grpc.aio.insecure_channel(run.server.address, [("grpc.use_local_subchannel_pool", 1)]) as fresh:
            health = health_pb2_grpc.HealthStub(fresh)
            response = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
            assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await run.readiness("liveness") == "SERVING"
        for call in calls:
            *_, last = await rest_of(call)
            assert last.finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
        assert [update.status for update in await rest_of(watch)] == [health_pb2.HealthCheckResponse.NOT_SERVING]
        assert await watch.code() is grpc.StatusCode.OK
        assert await run.exit_code() is ExitCode.CLEAN
    assert not log.of("fatal error")


@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_streams_over_the_grace_are_cut(model: Path, log: CapturedLogs, how: str) -> None:
    """At the end of the grace, or at a second signal, what still runs ends UNAVAILABLE DRAINING; the exit is clean."""
    grace_s = "0.2" if how == "grace" else "600"
    async with running(model, "--drain-grace", grace_s) as run:
        call = run.generate(Trigger.SILENT.value)
        await until(lambda: len(run.server._journal))
        run.server.request_stop()
        if how == "second signal":
            run.server.request_stop()
        assert details(await error_of(call))[0] == "DRAINING"
        assert await run.exit_code() is ExitCode.CLEAN
    assert not log.of("fatal error")


async def test_a_second_signal_waits_for_no_reader(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream whose reader has stalled cannot be told; the process leaves all the same, without any grace."""
    monkeypatch.setattr("service.server.AFTER_GRACE_TIMEOUT_S", 3600)
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with (
        running(model, "--reader-timeout", "3600") as run,
        grpc.aio.insecure_channel(run.server.address, narrow) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(1, max_tokens=4000, request_id="l" * 128))
        await call.read()
        (stream,) = run.server._dispatcher._streams.values()
        await until(lambda: stream.is_paused)  # as many steps as it may have without coming back for more
        run.server.request_stop()
        run.server.request_stop()
        assert await run.exit_code() is ExitCode.CLEAN
        call.cancel()


async def test_a_stop_while_loading_is_quick_and_clean(model: Path, log: CapturedLogs) -> None:
    """A stop signal while the model loads ends with 0 and without waiting for the load."""
    async with running(model, engine=fake_engine(load_s=600), wait=False) as run:
        started_s = time.monotonic()
        run.server.request_stop()
        assert await run.exit_code() is ExitCode.CLEAN
        assert time.monotonic() - started_s < HANG_S
    assert not log.of("fatal error")


async def test_a_lost_listener_is_replaced(model: Path, log: CapturedLogs) -> None:
    """If gRPC closes the port by itself, it is open again for new connections, at the same address; it is the same
    server, no younger than before."""
    async with running(model) as run:
        before = await run.info.GetServerInfo(info_pb2.GetServerInfoRequest())
        await run.server._listeners[0]._server.stop(None)  # as the crash handler of gRPC's own loop does
        await until(lambda: log.of("listener lost"))
        async with grpc.aio.insecure_channel(run.server.address, [("grpc.use_local_subchannel_pool", 1)]) as fresh:
            health = health_pb2_grpc.HealthStub(fresh)
            request = health_pb2.HealthCheckRequest(service="readiness")
            response = await health.Check(request, wait_for_ready=True, timeout=60)
            assert response.status == health_pb2.HealthCheckResponse.SERVING
            after = await info_pb2_grpc.InfoServiceStub(fresh).GetServerInfo(info_pb2.GetServerInfoRequest())
            assert after.start_time == before.start_time


async def test_a_port_that_is_lost_for_good_ends_the_process(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the port cannot be had again, the process drains and ends with a bug's status, for another to be started."""
    async with running(model) as run:

        def taken(self: Server) -> grpc.aio.Server:
            listener = grpc.aio.server()
            monkeypatch.setattr(type(listener), "add_insecure_port", refuse)
            return listener

        def refuse(self: grpc.aio.Server, address: str) -> int:
            raise RuntimeError(address)

        monkeypatch.setattr(run.server._listeners[0], "_make_server", functools.partial(taken, run.server))
        await run.server._listeners[0]._server.stop(None)
        assert await run.exit_code() is ExitCode.BUG
    assert log.of("port lost")
