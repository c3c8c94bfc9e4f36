"""Each limit hit, and answered as the status table says: one server, with limits that a few callers reach."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e import tiny_model
from tests.e2e.harness import INFERENCE, Generation, ReflectionClient, Server, Status
from tests.e2e.http2 import BareCaller

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LATE = grpc.StatusCode.DEADLINE_EXCEEDED
HANG_S = 120.0
"""A bound against hanging."""
MAX_QUEUE_REQUESTS, MAX_QUEUE_TOKENS, MAX_PROMPT_TOKENS = 16, 1000, 600
NARROW = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))
"""Of a client that takes as little as gRPC can be made to take without reading."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model: Path = tiny_model.make(tmp_path_factory.mktemp("limits") / "tiny")
    with Server(
        model=model,
        max_num_seqs=1,
        max_queue_requests=MAX_QUEUE_REQUESTS,
        max_queue_tokens=MAX_QUEUE_TOKENS,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_output_tokens=7000,
        stream_buffer_tokens=8,
        reader_timeout=8,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ReflectionClient]:
    with ReflectionClient(server.address) as connected:
        yield connected


@pytest.fixture(autouse=True)
def idle(client: ReflectionClient) -> Iterator[None]:
    """Every test leaves nothing behind: no request that runs or waits, no block that is held."""
    yield
    deadline = time.monotonic() + HANG_S
    while (load := client.load()).running or load.waiting or load.kv_blocks_used:
        assert time.monotonic() < deadline, load
        time.sleep(0.05)


def fields(first_id: int, *, num_prompt: int = 4, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """`first_id` makes the prompt one of a kind, so that nothing of it is cached unless it was computed."""
    return {
        "token_ids": {"ids": [first_id, *range(1000, 999 + num_prompt)]},
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
        "output": {"token_ids": True},
        **more,
    }


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.01)


@contextlib.contextmanager
def blocked(client: ReflectionClient, *waiting: dict[str, Any]) -> Iterator[list[Any]]:
    """One endless stream runs, being read, and `waiting` are behind it; all are cancelled with the block."""
    with contextlib.ExitStack() as stack:
        running = client.stream(**fields(500, max_tokens=7000))
        stack.callback(running.cancel)
        next(running)
        reader = threading.Thread(target=swallow, args=[running], daemon=True)
        reader.start()
        stack.callback(reader.join, 10.0)
        stack.callback(running.cancel)  # before the join
        calls = []
        for number, request in enumerate(waiting):
            calls.append(client.stream(**request))
            stack.callback(calls[-1].cancel)
            until(lambda count=number + 1: client.load().waiting >= count)
        yield calls


def is_paused(client: ReflectionClient) -> bool:
    """Whether there is a request that waits and has been computed before."""
    load = client.load()
    return bool(load.waiting and not load.running and load.kv_blocks_used)


def swallow(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            pass


def expect_queue_full(generation: Generation) -> None:
    status = generation.expect(EXHAUSTED, "QUEUE_FULL").status
    assert status.pushback_ms is not None
    assert status.pushback_ms > 0
    assert status.retry_delay_s == pytest.approx(status.pushback_ms / 1000)


# Room


def test_too_many_requests(client: ReflectionClient) -> None:
    """One more than may wait is told QUEUE_FULL with the time to come back; the others wait on."""
    with blocked(client, *(fields(600 + number) for number in range(MAX_QUEUE_REQUESTS))) as calls:
        expect_queue_full(client.generate(**fields(700)))
        assert not any(call.done() for call in calls)


def test_too_many_tokens(client: ReflectionClient) -> None:
    """What waits is bounded in tokens, too: of two prompts with half of the bound and a little more only the first
    waits, and a small one beside it has room."""
    with blocked(client, fields(600, num_prompt=510), fields(601, num_prompt=200)) as calls:
        expect_queue_full(client.generate(**fields(602, num_prompt=510)))
        assert not any(call.done() for call in calls)


def test_a_prompt_that_is_too_long(client: ReflectionClient) -> None:
    """It is INVALID_ARGUMENT, not QUEUE_FULL: there will never be room for it, however full the queue is."""
    with blocked(client, fields(600)):
        status = client.generate(**fields(601, num_prompt=MAX_PROMPT_TOKENS + 1)).status
        assert status.code is grpc.StatusCode.INVALID_ARGUMENT
        assert str(MAX_PROMPT_TOKENS) in status.field_violations["token_ids.ids"]


# Time


@pytest.mark.parametrize("limit", ["max_queue_time", "max_time"])
def test_what_expires_in_the_queue_never_reaches_a_step(client: ReflectionClient, limit: str) -> None:
    """It is DEADLINE_EXCEEDED, naming limit and place; its prompt was not computed: the same one, sent again, finds
    nothing of it in the cache."""
    first_id = {"max_queue_time": 610, "max_time": 611}[limit]
    late = fields(first_id, num_prompt=300)
    with blocked(client):
        status = client.generate(**late, **{limit: "0.3s"}).expect(LATE, "TIME_LIMIT").status
        assert status.metadata == {"limit": limit, "place": "queue"}
    again = client.generate(**late).expect_ok()
    assert again.prompt.cached == 0
    assert client.generate(**late).expect_ok().prompt.cached > 0, "a prompt that was computed is found"


def test_the_deadline_of_the_call_bounds_the_wait(client: ReflectionClient) -> None:
    """A call whose own deadline passes in the queue is not computed either."""
    late = fields(620, num_prompt=300)
    with blocked(client):
        client.generate(**late, timeout_s=1.0).expect(LATE)
    assert client.generate(**late).expect_ok().prompt.cached == 0


def test_a_limit_that_cannot_be_met_is_refused_early(client: ReflectionClient) -> None:
    """Behind a queue that is known to be slow a call with a short limit is refused before it waits; one with a long
    limit waits, and is served."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(MAX_QUEUE_REQUESTS) as pool:

        def ask(number: int) -> Generation:
            first = iter([begun.release])
            return client.generate(
                **fields(630 + number, max_tokens=100), on_response=lambda _: next(first, lambda: None)()
            )

        queued = [pool.submit(ask, number) for number in range(MAX_QUEUE_REQUESTS)]
        for _ in range(9):
            assert begun.acquire(timeout=HANG_S)
        status = client.generate(**fields(650), max_queue_time="0.002s").expect(LATE, "TIME_LIMIT").status
        assert status.metadata == {"limit": "max_queue_time", "place": "admission"}
        client.generate(**fields(651), max_queue_time="100s").expect_ok()
        for one in queued:
            one.result().expect_ok()


def test_max_time_ends_an_answer_with_what_it_has(client: ReflectionClient) -> None:
    """TIME_LIMIT is a finish, not an error: the tokens that came are told and counted, and they are the right ones."""
    generation = client.generate(**fields(660, max_tokens=7000), max_time="1s").expect_ok()
    assert generation.finish_reason == "TIME_LIMIT"
    assert 0 < len(generation.token_ids) == generation.usage.completion < 7000
    begin = client.generate(**fields(660, max_tokens=8)).expect_ok()
    num_common = min(8, len(generation.token_ids))
    assert generation.token_ids[:num_common] == begin.token_ids[:num_common]


def test_complete_is_cut_like_a_stream(client: ReflectionClient) -> None:
    """The unary answer has the same finish and what there was."""
    answer = client.complete(**fields(661, max_tokens=7000), max_time="1s")
    (completion,) = answer.completions
    assert completion.finish.reason == 6
    assert 0 < len(completion.tokens) == answer.usage.completion


# Readers


def test_a_reader_that_stalls_is_told_and_holds_up_nobody(server: Server, client: ReflectionClient) -> None:
    """The server has one place in its batch, and a stream that nobody reads has it: it is paused, and whoever comes is
    served meanwhile; after the time for readers it ends SLOW_READER, which its caller finds when it reads at last."""
    alone = client.generate(**fields(670, max_tokens=40)).expect_ok()
    with client.new_channel(*NARROW) as channel:
        label = "stalled-".ljust(128, "x")
        call = client.stream(channel=channel, **fields(671, max_tokens=7000), request_id=label)
        until(lambda: is_paused(client))
        beside = client.generate(**fields(670, max_tokens=40)).expect_ok()
        assert beside.token_ids == alone.token_ids
        until(lambda: [line for line in server.events("request finished") if line["request_id"].startswith("stalled-")])
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        status = Status.of(caught.value)
        assert (status.code, status.reason) == (EXHAUSTED, "SLOW_READER")


def test_a_whole_answer_that_nobody_reads_is_no_exception(server: Server, client: ReflectionClient) -> None:
    """Complete's one message has a place for as long as readers may take, and no longer; what its caller finds when it
    reads at last is SLOW_READER. One that is read in time is whole."""
    label = "unread"
    fields_of_it = fields(675, max_tokens=400, request_id=label)
    whole = client.complete(**{**fields_of_it, "request_id": "read"}).completions[0]
    request = client.request(f"{INFERENCE}/Complete", **fields_of_it).SerializeToString()
    with BareCaller(client.address, window_bytes=0) as caller:
        stream_id = caller.call(f"{INFERENCE}/Complete", request)
        until(lambda: [line for line in server.events("request finished") if line["request_id"] == label])
        (line,) = [line for line in server.events("request finished") if line["request_id"] == label]
        assert (line["method"], line["reason"]) == ("Complete", "SLOW_READER")
        caller.open_window(stream_id)
        caller.until_ended(stream_id, HANG_S)
    with BareCaller(client.address, window_bytes=0) as caller:
        stream_id = caller.call(f"{INFERENCE}/Complete", request)
        until(lambda: client.load().live_calls and not client.load().running)
        caller.open_window(stream_id)
        caller.until_ended(stream_id, HANG_S)
        (response,) = caller.messages(client.message("CompleteResponse"), stream_id)
    assert [token.id for token in response.completions[0].tokens] == [token.id for token in whole.tokens]


def test_a_reader_that_comes_back_misses_nothing(client: ReflectionClient) -> None:
    """A paused stream goes on when it is read, with the tokens that it would have had."""
    alone = client.generate(**fields(680, max_tokens=800)).expect_ok()
    request = client.request(f"{INFERENCE}/Generate", **fields(680, max_tokens=800)).SerializeToString()
    with BareCaller(client.address, window_bytes=0) as caller:
        stream_id = caller.call(f"{INFERENCE}/Generate", request)
        until(lambda: is_paused(client))
        assert caller.num_bytes(stream_id) == 0
        caller.open_window(stream_id)
        caller.until_ended(stream_id, HANG_S)
        responses = caller.messages(client.message("GenerateResponse"), stream_id)
    assert [token.id for response in responses for token in response.tokens] == alone.token_ids
    assert responses[-1].usage.completion == 800


# Messages


def test_a_stream_interval_makes_larger_messages(client: ReflectionClient) -> None:
    """The same tokens in messages of at least so many, but for the last."""
    one_by_one = client.generate(**fields(690, max_tokens=50)).expect_ok()
    generation = client.generate(
        **{**fields(690, max_tokens=50), "output": {"token_ids": True, "stream_interval": 16}}
    ).expect_ok()
    assert generation.token_ids == one_by_one.token_ids
    assert generation.text == one_by_one.text
    assert all(len(response.tokens) >= 16 for response in generation.responses[:-1])
