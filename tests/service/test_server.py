"""A whole front end in this process, over real gRPC, with a fake engine behind it: see `fake_engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from emberline.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    info_pb2,
    info_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from service.cli import build_parser
from service.config import parse
from service.exit import ExitCode
from service.server import Server
from tests.service import tiny_tokenizers
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.support import HANG_S, CapturedLogs, captured_logs, fake_engine, until

CANARY = "xylophone"


@pytest.fixture
def log() -> Iterator[CapturedLogs]:
    with captured_logs() as log:
        yield log


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.write_model(
        tmp_path_factory.mktemp("model"),
        tiny_tokenizers.byte_level(),
        config={"max_position_embeddings": 4096, "eos_token_id": 150},
        chat_template=tiny_tokenizers.CHATML,
    )


class Running:
    """A server that runs as a task, and stubs to call it."""

    def __init__(self, server: Server, task: asyncio.Task[ExitCode], channel: grpc.aio.Channel) -> None:
        self.server = server
        self.task = task
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.info = info_pb2_grpc.InfoServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def exit_code(self) -> ExitCode:
        return await asyncio.wait_for(asyncio.shield(self.task), HANG_S)

    async def wait_serving(self) -> None:
        async with asyncio.timeout(HANG_S):
            async for update in self.health.Watch(health_pb2.HealthCheckRequest()):
                if update.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    async def readiness(self, name: str = "readiness") -> str:
        response = await self.health.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_idle(self) -> None:
        """Until no request is left anywhere."""
        async with asyncio.timeout(HANG_S):
            while True:
                load = await self.info.GetLoad(info_pb2.GetLoadRequest())
                if load.running == load.waiting == load.kv_blocks_used == 0:
                    return
                await asyncio.sleep(0.01)

    def generate(self, *prompt: int, **fields: Any) -> Any:
        return self.inference.Generate(request(*prompt, **fields), timeout=HANG_S)


def request(*prompt: int, max_tokens: int = 5, **fields: Any) -> inference_pb2.GenerateRequest:
    if "text" not in fields:
        fields["token_ids"] = inference_pb2.TokenIds(ids=prompt or (1, 2))
    stopping = fields.pop("stopping", inference_pb2.StoppingOptions(max_tokens=max_tokens))
    return inference_pb2.GenerateRequest(stopping=stopping, **fields)


@contextlib.asynccontextmanager
async def running(
    model: Path, *arguments: str, engine: tuple[str, ...] | None = None, wait: bool = True
) -> AsyncIterator[Running]:
    flags = ["serve", "--model", str(model), "--port", "0", "--served-model-name", "tiny"]
    flags += ["--max-output-tokens", "4000", *arguments]
    config = parse(build_parser().parse_args(flags), {})
    server = Server(config, engine_command=engine or fake_engine())
    task = asyncio.create_task(server.run())
    await until(lambda: server.address or task.done())
    async with grpc.aio.insecure_channel(server.address, [("grpc.enable_retries", 0)]) as channel:
        run = Running(server, task, channel)
        try:
            if wait:
                await run.wait_serving()
            yield run
        finally:
            server.request_stop()
            server.request_stop()
            await asyncio.wait_for(task, HANG_S)


def details(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], str | None]:
    """ErrorInfo's reason and metadata, and the pushback."""
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    pushback = trailing.get("grpc-retry-pushback-ms")
    return info.reason, dict(info.metadata), pushback if pushback is None else str(pushback)


async def rest_of(call: Any) -> list[Any]:
    """What a stream still has to say."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rest_of(call) if hasattr(call, "read") else call)
    return caught.value


def text_of(model: Path, token_ids: list[int]) -> str:
    return tiny_tokenizers.load_tokenizer(model).decode(token_ids)


# ---------------------------------------------------------------------------------------------------------- streams


async def test_generate_streams_the_tokens_of_its_request(model: Path, log: CapturedLogs) -> None:
    """The concatenated text is that of the engine's tokens; the first message has the prompt's facts, the last the
    finish and the usage; the request's one log line counts them."""
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(1, 2, 3, max_tokens=20, request_id="mine")]
    expected = tokens_of((1, 2, 3), 20)
    assert "".join(delta.text for delta in deltas) == text_of(model, expected)
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert deltas[0].prompt.count == 3
    assert not any(delta.HasField("prompt") for delta in deltas[1:])
    assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (deltas[-1].usage.prompt, deltas[-1].usage.completion) == (3, 20)
    assert not any(delta.HasField("finish") or delta.HasField("usage") for delta in deltas[:-1])
    (line,) = log.of("request finished")
    assert line["request_id"] == "mine"
    assert (line["finish"], line["num_prompt_tokens"], line["num_output_tokens"]) == ("MAX_TOKENS", 3, 20)


async def test_complete_is_the_fold_of_generate(model: Path, log: CapturedLogs) -> None:
    """The unary answer holds the same text, tokens, finish and usage as the stream."""
    output = inference_pb2.OutputOptions(token_ids=True)
    async with running(model) as run:
        answer = await run.inference.Complete(request(4, 5, max_tokens=9, output=output))
    (completion,) = answer.completions
    assert [token.id for token in completion.tokens] == tokens_of((4, 5), 9)
    assert completion.text == text_of(model, tokens_of((4, 5), 9))
    assert completion.finish.reason == inference_pb2.FINISH_REASON_MAX_TOKENS
    assert (answer.usage.prompt, answer.usage.completion, answer.prompt.count) == (2, 9, 2)
    assert answer.request_id


async def test_a_stop_string_ends_the_request_in_the_engine(model: Path, log: CapturedLogs) -> None:
    """The text ends before the stop string, tokens past it are not counted, and the engine's blocks are freed."""
    whole = text_of(model, tokens_of((1, 2), 60))
    stop = whole[20:23]
    async with running(model) as run:
        stopping = inference_pb2.StoppingOptions(max_tokens=4000, stop_strings=[stop])
        deltas = [delta async for delta in run.generate(1, 2, stopping=stopping)]
        await run.wait_idle()
    assert "".join(delta.text for delta in deltas) == whole[:20]
    assert deltas[-1].finish.reason == inference_pb2.FINISH_REASON_STOP_STRING
    assert deltas[-1].finish.matched == stop
    assert deltas[-1].usage.completion == 23


async def test_resumed_tokens_are_not_sent_again(model: Path, log: CapturedLogs) -> None:
    """A resumed stream sends what would have followed; one that had reached max_tokens ends at once."""
    tokens = tokens_of((1, 2), 10)
    async with running(model) as run:
        deltas = [delta async for delta in run.generate(1, 2, max_tokens=10, resume_token_ids=tokens[:6])]
        over = [delta async for delta in run.generate(1, 2, max_tokens=10, resume_token_ids=tokens)]
    assert "".join(delta.text for delta in deltas) == text_of(model, tokens)[6:]
    assert deltas[-1].usage.completion == 4
    (only,) = over
    assert (only.text, only.finish.reason) == ("", inference_pb2.FINISH_REASON_MAX_TOKENS)
    assert (only.usage.prompt, only.usage.completion) == (2, 0)


async def test_a_cancelled_stream_is_aborted(model: Path, log: CapturedLogs) -> None:
    """A client that goes away between messages gives back its place and its blocks; the journal forgets it, and no
    error is logged."""
    async with running(model, engine=fake_engine(step_s=0)) as run:
        calls = [run.generate(1, n, max_tokens=4000) for n in range(20)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        await run.wait_idle()
        assert len(run.server._journal) == 0
        async with asyncio.timeout(HANG_S):
            await run.server._admission.idle.wait()
        finished = log.of("request finished")
        assert [line.get("error") for line in finished] == ["Cancelled"] * 20
    assert not [record for record in log.records if record["level"] in ("error", "critical")]


async def test_a_client_that_goes_away_while_it_stalls_its_stream_gives_back_its_place(
    model: Path, log: CapturedLogs
) -> None:
    """A call whose message waits for a reader that never reads is cleaned up as soon as its client is gone, not when a
    garbage collector finds it."""
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with running(model) as run, grpc.aio.insecure_channel(run.server.address, narrow) as channel:
        label = "l" * 128
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request(1, max_tokens=4000, request_id=label), timeout=HANG_S)
        await call.read()
        (stream,) = run.server._supervisor.client._streams.values()
        await until(lambda: len(stream._outputs) >= 100)  # a hundred steps without coming back for more
        gc.disable()
        try:
            call.cancel()
            async with asyncio.timeout(HANG_S):
                await run.server._admission.idle.wait()
        finally:
            gc.enable()


async def test_a_label_is_unique_among_live_calls(model: Path, log: CapturedLogs) -> None:
    """A second live call with the same request_id is told ALREADY_EXISTS; after the end the label is free."""
    async with running(model) as run:
        first = run.generate(1, max_tokens=4000, request_id="same")
        await first.read()
        error = await error_of(run.generate(1, request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        first.cancel()
        await run.wait_idle()
        assert [delta async for delta in run.generate(1, request_id="same")]


async def test_a_full_queue_is_told_with_pushback(model: Path, log: CapturedLogs) -> None:
    """Requests over the bound get RESOURCE_EXHAUSTED and a time to come back; those within it are served."""
    async with running(model, "--max-queue-requests", "2") as run:
        silent = [run.generate(Trigger.SILENT.value, n) for n in range(2)]
        await until(lambda: run.server._admission.num_waiting == 2)
        error = await error_of(run.generate(1))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reason, _, pushback = details(error)
        assert reason == "QUEUE_FULL"
        assert int(pushback or 0) > 0
        silent[0].cancel()
        await run.wait_idle()
        await until(lambda: run.server._admission.num_waiting <= 1)
        assert [delta async for delta in run.generate(1)]


async def test_our_own_bug_leaks_nothing(model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen exception is INTERNAL with an incident id that one log line explains, without the exception's
    text, which may hold a caller's, and without a traceback."""

    def broken(*_: object, **__: object) -> None:
        raise KeyError(CANARY)

    async with running(model) as run:
        monkeypatch.setattr("service.convert.to_submit", broken)
        error = await error_of(run.generate(text=f"{CANARY} one"))
        assert error.code() is grpc.StatusCode.INTERNAL
        reason, metadata, _ = details(error)
        assert reason == "INTERNAL"
        assert run.server._admission.num_live == 0
    (record,) = log.of("internal error")
    assert record["incident_id"] == metadata["incident_id"]
    assert record["exception_type"] == "builtins.KeyError"
    assert CANARY not in log.text + str(error)
    assert "Traceback" not in log.text


# ---------------------------------------------------------------------------------------------- start, health, facts


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
        assert (reason, pushback) == ("ENGINE_STARTING", "1000")
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


async def test_text_and_chat_reach_the_engine_as_tokens(model: Path, log: CapturedLogs) -> None:
    """Text and conversations are encoded as Tokenize tells, and Detokenize turns ids back."""
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    async with running(model) as run:
        for fields in ({"text": "over there"}, {"chat": chat}):
            ids = tuple((await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(**fields))).ids)
            message = inference_pb2.GenerateRequest(stopping=inference_pb2.StoppingOptions(max_tokens=3), **fields)
            answer = await run.inference.Complete(message)
            assert answer.completions[0].text == text_of(model, tokens_of(ids, 3))
            assert answer.usage.prompt == len(ids)
        ids = (await run.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text="over there"))).ids
        back = await run.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=ids))
        assert back.text == "over there"


async def test_info_tells_what_is_served(model: Path, log: CapturedLogs) -> None:
    """GetModelInfo and GetServerInfo tell the engine's own facts; another model's name is NOT_FOUND."""
    async with running(model, "--max-prompt-tokens", "100") as run:
        info = await run.info.GetModelInfo(info_pb2.GetModelInfoRequest())
        assert (info.model, info.model_type, info.vocab_size) == ("tiny", "fake", 1000)
        assert (info.limits.max_model_len, info.limits.max_prompt_tokens) == (4096, 100)
        assert info.capabilities.chat
        (engine,) = (await run.info.GetServerInfo(info_pb2.GetServerInfoRequest())).engines
        assert engine.state == info_pb2.ENGINE_STATE_READY
        assert engine.pid > 0
        error = await error_of(run.info.GetModelInfo(info_pb2.GetModelInfoRequest(model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


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


async def test_a_stop_while_loading_is_quick_and_clean(model: Path, log: CapturedLogs) -> None:
    """A stop signal while the model loads ends with 0 and without waiting for the load."""
    async with running(model, engine=fake_engine(load_s=600), wait=False) as run:
        started_s = time.monotonic()
        run.server.request_stop()
        assert await run.exit_code() is ExitCode.CLEAN
        assert time.monotonic() - started_s < HANG_S
    assert not log.of("fatal error")
