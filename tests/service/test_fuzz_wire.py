"""Whatever bytes a call brings, it ends with a status that is not our fault, and the server is as it was."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st

from emberline.v1 import admin_pb2, inference_pb2, info_pb2, tokenizer_pb2
from tests.service.fake_engine import Trigger
from tests.service.front_end import Running, running
from tests.service.generated_messages import CANARY, messages, mutated, num_examples
from tests.service.support import HANG_S, CapturedLogs, fake_engine

FILES = (inference_pb2, tokenizer_pb2, info_pb2, admin_pb2, health_pb2, reflection_pb2)
METHODS = [
    method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # a valid one ends the server, which is its job; conversion has its own test
]
OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
LABEL = re.compile(r"[ -~]{1,128}")
WATCH = "/grpc.health.v1.Health/Watch"
"""It has no end; after its first message it is cancelled."""

CLIENTS_OWN = "Internal error from Core"
"""What grpc.aio's client makes of a second message for a call that has been answered already."""

Call = tuple[str, tuple[bytes, ...]]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A method, and the bytes of the messages sent to it: mostly one, whole, mutated or no message at all."""
    method: MethodDescriptor = draw(st.sampled_from(METHODS))
    sent = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2]))):
        data = draw(messages(method.input_type)).SerializeToString()
        match draw(st.sampled_from(["whole", "mutated", "mutated", "random"])):
            case "whole":
                sent.append(data)
            case "mutated":
                sent.append(draw(mutated(data)))
            case "random":
                sent.append(draw(st.binary(max_size=64)))
    assert method.containing_service is not None
    return f"/{method.containing_service.full_name}/{method.name}", tuple(sent)


def is_trigger(call: Call) -> bool:
    """Whether it would make the fake engine misbehave, which is not this test's matter."""
    for data in call[1]:
        try:
            ids = inference_pb2.GenerateRequest.FromString(data).token_ids.ids
        except DecodeError:
            continue
        if ids and ids[0] in set(Trigger):
            return True
    return False


async def outcome(run: Running, call: Call) -> tuple[grpc.StatusCode, str]:
    """How it ended, and all that the caller was told."""
    path, sent = call
    stream = run.channel.stream_stream(path)(timeout=HANG_S)
    try:
        for data in sent:
            await stream.write(data)
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            if path == WATCH:
                stream.cancel()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # it has ended before all was sent
    except asyncio.CancelledError:
        if not stream.cancelled():
            raise
    return await stream.code(), f"{await stream.details()} {await stream.trailing_metadata()}"


async def check(run: Running, batch: Sequence[Call], seen: Counter[str]) -> None:
    outcomes = await asyncio.wait_for(asyncio.gather(*(outcome(run, call) for call in batch)), 2 * HANG_S)
    for call, (code, told) in zip(batch, outcomes, strict=True):
        seen[f"{call[0].rpartition('/')[2]} {code.name}"] += 1
        assert code not in OUR_FAULT or (told.startswith(CLIENTS_OWN) and len(call[1]) > 1), (call, told)
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or "emberline" in told, (call, told)
        assert CANARY not in told, call
    assert await run.readiness() == "SERVING"


def test_any_bytes_to_any_method(model: Path, log: CapturedLogs) -> None:
    """No INTERNAL, no hang, no traceback and no error in the log, nothing of it in a status or a line; the engine does
    not notice.
    """
    with asyncio.Runner() as runner:
        stack, seen = AsyncExitStack(), Counter[str]()
        arguments = ("--max-output-tokens", "8", "--enable-admin")
        run = runner.run(stack.enter_async_context(running(model, *arguments, engine=fake_engine(step_s=0.0005))))
        try:

            @num_examples(60)
            @given(batch=st.lists(calls().filter(lambda call: not is_trigger(call)), min_size=1, max_size=4))
            def every_batch_is_harmless(batch: list[Call]) -> None:
                runner.run(check(run, batch, seen))

            every_batch_is_harmless()
            runner.run(run.wait_idle())
        finally:
            runner.run(stack.aclose())
            print(", ".join(f"{outcome}: {number}" for outcome, number in sorted(seen.items())))
    lines = log.records
    for line in lines:
        if LABEL.fullmatch(line.get("request_id", "")):
            del line["request_id"]  # a caller's label is meant for the log
    assert CANARY not in str(lines)
    assert "Traceback" not in log.text
    assert [record for record in log.records if record["level"] in ("error", "critical")] == []
