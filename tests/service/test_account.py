"""The one line of a call, and the ids on all lines of it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from pathlib import Path

import grpc
import pytest

from scheduler import logs
from service.call_record import CallRecord, Timeline
from tests.service.fake_engine import Trigger
from tests.service.front_end import CANARY, error_of, request, rest_of, running
from tests.service.support import HANG_S, CapturedLogs, fake_engine, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def record(**timeline: float | None) -> CallRecord:
    return CallRecord("Generate", "label", "OK", "", "eos", 100.0, 110.0, Timeline(**timeline))  # type: ignore[arg-type]


def test_the_phases_add_up() -> None:
    """Queue, prefill and decode are the whole of a call that came to tokens."""
    call = record(sent_s=101.0, engine_queue_s=2.0, first_output_s=105.0, last_output_s=109.0)
    assert (call.queue_s, call.prefill_s, call.decode_s, call.total_s) == (3, 2, 5, 10)


def test_a_phase_that_was_not_reached_is_none() -> None:
    """A call that was never sent has queued all its time; one without a token has spent the rest on its prefill."""
    assert (record().queue_s, record().prefill_s, record().decode_s) == (10, None, None)
    sent = record(sent_s=104.0)
    assert (sent.queue_s, sent.prefill_s, sent.decode_s) == (4, 6, None)


async def test_the_line_of_a_call_that_ended_well(model: Path, log: CapturedLogs) -> None:
    """Ids, counts, times that add up, how it ended and who did it."""
    async with running(model) as run:
        message = request(1, 2, 3, max_tokens=20, request_id="mine")
        await rest_of(run.inference.Generate(message, metadata=(("traceparent", TRACEPARENT),)))
    (line,) = log.of("request finished")
    assert (line["request_id"], line["trace_id"], line["method"]) == ("mine", TRACE_ID, "Generate")
    assert (line["status"], line["finish"], line["n"]) == ("OK", "MAX_TOKENS", 1)
    assert (line["num_prompt_tokens"], line["num_output_tokens"]) == (3, 20)
    assert (line["engine"], line["num_attempts"], line["num_deaths"]) == (0, 1, 0)
    assert line["queue_ms"] + line["prefill_ms"] + line["decode_ms"] == pytest.approx(line["total_ms"], abs=0.2)
    assert "reason" not in line
    assert "error" not in line


async def test_a_refused_call_has_its_line(model: Path, log: CapturedLogs) -> None:
    """Its status and reason are there; its text is not, nor the model's name that it asked for."""
    async with running(model) as run:
        await error_of(run.generate(text=CANARY, model=CANARY, request_id="lost"))
        await error_of(run.inference.Complete(request(max_tokens=0)))
    unknown, invalid = log.of("request finished")
    assert (unknown["request_id"], unknown["status"], unknown["reason"]) == ("lost", "NOT_FOUND", "UNKNOWN_MODEL")
    assert (invalid["method"], invalid["status"]) == ("Complete", "INVALID_ARGUMENT")
    assert invalid["num_attempts"] == 0
    assert invalid["request_id"]
    assert CANARY not in log.text


@pytest.mark.parametrize("label", ["x" * 100_000, "\x1b[2J", "x\ny", "é"])
async def test_a_label_that_is_not_allowed_is_not_logged(model: Path, log: CapturedLogs, label: str) -> None:
    """The call is refused, and its line has a label that was made for it: no escape sequence reaches a terminal."""
    async with running(model) as run:
        await error_of(run.generate(1, request_id=label))
    (line,) = log.of("request finished")
    assert line["status"] == "INVALID_ARGUMENT"
    assert re.fullmatch("[0-9a-f]{32}", line["request_id"])


async def test_the_longest_label_is_logged_whole(model: Path, log: CapturedLogs) -> None:
    """A call's last line is found by the label that its caller knows, as its other lines are."""
    async with running(model) as run:
        await rest_of(run.generate(1, request_id="l" * 128))
    assert [line["request_id"] for line in log.of("request finished")] == ["l" * 128]


async def test_a_deadline_is_told_from_a_cancel(model: Path, log: CapturedLogs) -> None:
    """Both end the call's task in the same way; the line says which it was."""
    async with running(model, engine=fake_engine(step_s=0.01)) as run:
        late = run.inference.Generate(request(1, max_tokens=4000), timeout=0.5)
        assert (await error_of(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        left = run.generate(2, max_tokens=4000)
        await left.read()
        left.cancel()
        await until(lambda: len(log.of("request finished")) == 2)
    statuses = [line["status"] for line in log.of("request finished")]
    assert statuses == ["DEADLINE_EXCEEDED", "CANCELLED"]


async def test_a_replayed_call_tells_its_deaths(model: Path, log: CapturedLogs) -> None:
    """Two attempts and one death, and still one line."""
    async with running(model, "--on-engine-death", "replay", "--max-engine-restarts", "5") as run:
        stream = run.generate(1, 2, max_tokens=600)
        await stream.read()
        os.kill(run.server._supervisor.replicas[0].pid, signal.SIGKILL)
        await rest_of(stream)
    (line,) = log.of("request finished")
    assert (line["status"], line["num_attempts"], line["num_deaths"]) == ("OK", 2, 1)
    (again,) = log.of("stream goes on")
    assert again["request_id"] == line["request_id"]


async def test_crowds_are_quiet(model: Path, log: CapturedLogs) -> None:
    """What ends with a death has its line at debug: the death's own record tells how many there were."""
    async with running(model, "--max-engine-restarts", "5") as run:
        await error_of(run.generate(Trigger.EXIT_ZERO, 1))
    (line,) = log.of("request finished")
    assert (line["level"], line["status"], line["reason"]) == ("debug", "UNAVAILABLE", "ENGINE_DEAD")


async def test_every_line_of_a_call_carries_its_ids(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loop and in the worker threads; two calls at once do not lend each other theirs, and what is logged on
    nobody's behalf carries none.
    """
    async with running(model) as run:
        tokenizer = run.server._backend.tokenizer
        assert tokenizer is not None
        encode = type(tokenizer).encode

        def encode_and_tell(self: object, prompt: object) -> object:
            logs.get_logger().info("encoding")
            return encode(self, prompt)  # type: ignore[arg-type]

        monkeypatch.setattr(type(tokenizer), "encode", encode_and_tell)
        calls = [
            run.inference.Generate(
                request(n, max_tokens=9, request_id=f"call-{n}"),
                metadata=(("traceparent", f"00-{n:032x}-{n:016x}-01"),),
                timeout=HANG_S,
            )
            for n in range(1, 9)
        ]
        for one in calls:
            await rest_of(one)
    told = {(line["request_id"], line["trace_id"]) for line in log.of("encoding")}
    assert told == {(f"call-{n}", f"{n:032x}") for n in range(1, 9)}
    finished = {(line["request_id"], line["trace_id"]) for line in log.of("request finished")}
    assert finished == told
    for event in ("serving", "engine ready", "stopped"):
        assert all("request_id" not in line for line in log.of(event))


async def test_our_own_bug_is_logged_under_the_calls_id(
    model: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The incident's line and the call's own can be found by one request_id."""
    async with running(model) as run:

        def fail(*_: object, **__: object) -> object:
            raise RuntimeError(CANARY)

        monkeypatch.setattr(type(run.server._dispatcher), "open", fail)
        await error_of(run.generate(1, request_id="mine"))
    (incident,) = log.of("internal error")
    (line,) = log.of("request finished")
    assert (incident["request_id"], line["request_id"], line["status"]) == ("mine", "mine", "INTERNAL")
    assert CANARY not in log.text


async def test_live_calls_are_counted_and_given_back(model: Path, log: CapturedLogs) -> None:
    """However a call ends, it is live no more."""
    async with running(model) as run:
        totals = run.server._backend.totals
        stream = run.generate(1, max_tokens=4000)
        await stream.read()
        assert totals.num_live_calls == 1
        stream.cancel()
        await until(lambda: totals.num_live_calls == 0)
        await error_of(run.generate(1, model="other"))
        await rest_of(run.generate(1, max_tokens=3))
        assert (totals.num_live_calls, totals.num_finished_calls, totals.num_failed_calls) == (0, 3, 0)


async def test_the_line_names_the_client(model: Path, log: CapturedLogs, tmp_path: Path) -> None:
    """By what its token stands for; the token itself is nowhere."""
    token = f"{CANARY}-token"
    path = tmp_path / "tokens"
    path.write_text(f"reporter inference,info {hashlib.sha256(token.encode()).hexdigest()}\n")
    async with running(model, "--auth-tokens", str(path)) as run:
        metadata = (("authorization", f"Bearer {token}"),)
        await rest_of(run.inference.Generate(request(1, max_tokens=3), metadata=metadata, timeout=HANG_S))
    (line,) = log.of("request finished")
    assert line["client"] == "reporter"
    assert CANARY not in log.text
