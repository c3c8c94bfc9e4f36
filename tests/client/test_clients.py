"""Both clients against servers that do what they are told: what is sent how often, and what a caller sees."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from emberline.client import AsyncClient, Client, Delta, EmberlineError, Resume, errors, results
from emberline.v1 import info_pb2
from tests.client.fake_server import (
    FIRST_TOKEN,
    LIMIT_S,
    PROMPT_TOKENS,
    SEED,
    Attempt,
    End,
    FakeServer,
    all_requests,
    until,
    word,
)

CODES = grpc.StatusCode
GONE = End(CODES.UNAVAILABLE)
TEN_WORDS = "".join(map(word, range(10)))
BOTH = pytest.mark.parametrize("kind", ["sync", "aio"])


def read(kind: str, target: str, *, settings: dict[str, Any] | None = None, **options: Any) -> list[Delta]:
    """A whole stream, by one of the clients."""
    options = {"timeout_s": LIMIT_S, **options}
    if kind == "sync":
        with Client(target, **settings or {}) as client:
            return list(client.generate("x", **options))

    async def collect() -> list[Delta]:
        async with AsyncClient(target, **settings or {}) as client:
            return [delta async for delta in client.generate("x", **options)]

    return asyncio.run(collect())


def fails(kind: str, target: str, **options: Any) -> EmberlineError:
    """How it fails."""
    with pytest.raises(EmberlineError) as told:
        read(kind, target, **options)
    return told.value


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# -------------------------------------------------------------------------------------------------------------- retries


@BOTH
def test_what_has_not_begun_is_tried_again(kind: str) -> None:
    """UNAVAILABLE and RESOURCE_EXHAUSTED before the first message are no news to the caller, and the server's pushback
    is waited for.
    """
    refusals = [
        Attempt(0, End(CODES.UNAVAILABLE, "ENGINE_STARTING", pushback_ms=150)),
        Attempt(0, End(CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL", pushback_ms=20)),
    ]
    with FakeServer(*refusals) as server:
        assert text(read(kind, server.address)) == TEN_WORDS
    assert server.num_calls == 3
    assert server.arrivals_s[1] - server.arrivals_s[0] >= 0.15
    assert server.metadata[2]["grpc-previous-rpc-attempts"] == "2"


@BOTH
def test_a_server_that_goes_away_before_the_next_attempt(kind: str) -> None:
    """A stream that is to be tried again in a while ends, though nobody is there by then."""
    with FakeServer(Attempt(num_tokens=0, end=End(CODES.UNAVAILABLE, pushback_ms=1000))) as server:

        def leave() -> None:
            until(lambda: server.num_calls > 0)
            time.sleep(0.3)  # for the status to be there
            server.stop()

        leaving = threading.Thread(target=leave)
        leaving.start()
        try:
            assert fails(kind, server.address).code is CODES.UNAVAILABLE
        finally:
            leaving.join()


@BOTH
def test_attempts_are_bounded(kind: str) -> None:
    """Four by default, one if so said; the last error is told."""
    refusal = Attempt(0, End(CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL", pushback_ms=1))
    for settings, number in (({}, 4), ({"attempts_max": 1}, 1)):
        with FakeServer(*[refusal] * 9) as server:
            error = fails(kind, server.address, settings=settings)
        assert isinstance(error, errors.QueueFullError)
        assert error.retry_after_s == 0.001
        assert server.num_calls == number


@BOTH
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_suspect_is_never_sent_again(kind: str, resume: bool, num_tokens: int) -> None:
    """Pushback −1: not before its first token, not after, not to the other server, not with resume."""
    end = End(CODES.UNAVAILABLE, "ENGINE_DEAD", {"death_id": "d1"}, pushback_ms=-1)
    suspect = Attempt(num_tokens, end)
    with FakeServer(*[suspect] * 9) as one, FakeServer(*[suspect] * 9) as other:
        error = fails(kind, f"{one.address},{other.address}", resume=resume)
    assert isinstance(error, errors.EngineDeadError)
    assert (error.death_id, error.may_retry) == ("d1", False)
    assert len(all_requests([one, other])) == 1


@BOTH
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("pushback_ms", [-1, None])
def test_poison_is_never_sent_again(kind: str, resume: bool, pushback_ms: int | None) -> None:
    """INTERNAL is final, whatever goes with it."""
    end = End(CODES.INTERNAL, "POISON_REQUEST", {"death_id": "d1"}, pushback_ms=pushback_ms)
    with FakeServer(*[Attempt(0, end)] * 9) as server:
        error = fails(kind, server.address, resume=resume)
    assert isinstance(error, errors.PoisonRequestError)
    assert server.num_calls == 1


def test_a_long_request_is_tried_again() -> None:
    """A prompt larger than gRPC's own retry buffer (256 KiB) is kept for another attempt all the same."""
    with FakeServer(Attempt(0, GONE)) as server, Client(server.address) as client:
        answer = client.complete([2**31] * 200_000, timeout_s=LIMIT_S)
    assert answer.text == TEN_WORDS
    assert [len(request.token_ids.ids) for request in server.requests] == [200_000] * 2


def test_a_bad_request_names_its_fields() -> None:
    """All violations, as the server lists them; nothing is tried again."""
    violations = (("sampling.top_p", "must be in [0, 1]"), ("stopping.max_tokens", "at least 1"))
    refusal = Attempt(0, End(CODES.INVALID_ARGUMENT, violations=violations))
    with (
        FakeServer(refusal) as server,
        Client(server.address) as client,
        pytest.raises(errors.InvalidRequestError) as told,
    ):
        client.complete("x", timeout_s=LIMIT_S)
    assert [(one.field, one.description) for one in told.value.field_violations] == list(violations)
    assert server.num_calls == 1


# ------------------------------------------------------------------------------------------------------------ balancing


@pytest.mark.slow
@BOTH
def test_only_servers_that_serve_are_called(kind: str) -> None:
    """NOT_SERVING is left out from the first call on, and taken in when it changes its mind, while the other one
    changes its own.
    """
    with FakeServer(serving=False) as one, FakeServer() as other:
        target = f"{one.address},{other.address}"

        async def scenario() -> None:
            async with AsyncClient(target) as client:
                for _ in range(6):
                    await client.generate("x", timeout_s=LIMIT_S).answer()
                assert (one.num_calls, other.num_calls) == (0, 6)
                one.set_serving(True)
                while not one.num_calls:
                    await client.generate("x", timeout_s=LIMIT_S).answer()
                other.set_serving(False)
                num_before = -1
                while other.num_calls != num_before:  # the change is on its way
                    num_before = other.num_calls
                    for _ in range(6):
                        await client.generate("x", timeout_s=LIMIT_S).answer()

        def threads() -> None:
            with Client(target) as client:
                for _ in range(6):
                    client.generate("x", timeout_s=LIMIT_S).answer()
                assert (one.num_calls, other.num_calls) == (0, 6)
                one.set_serving(True)
                deadline_s = time.monotonic() + LIMIT_S
                while not one.num_calls:
                    client.generate("x", timeout_s=LIMIT_S).answer()
                    assert time.monotonic() < deadline_s
                other.set_serving(False)
                num_before = -1
                while other.num_calls != num_before:  # the change is on its way
                    num_before = other.num_calls
                    for _ in range(6):
                        client.generate("x", timeout_s=LIMIT_S).answer()
                    assert time.monotonic() < deadline_s

        if kind == "sync":
            threads()
        else:
            asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_load_is_spread() -> None:
    """Of two that serve each gets its half."""
    with FakeServer() as one, FakeServer() as other, Client([one.address, other.address]) as client:
        for server in (one, other):  # both are connected
            until(lambda server=server: client.generate("x", timeout_s=LIMIT_S).answer() and server.num_calls > 0)
        before = one.num_calls, other.num_calls
        for _ in range(8):
            client.generate("x", timeout_s=LIMIT_S).answer()
    assert (one.num_calls - before[0], other.num_calls - before[1]) == (4, 4)


def test_a_server_that_is_not_there_is_left_out() -> None:
    """Refused connections cost no call."""
    with FakeServer() as gone:
        pass
    with FakeServer() as server, Client([gone.address, server.address]) as client:
        for _ in range(6):
            assert client.complete("x", timeout_s=LIMIT_S).text == TEN_WORDS


def test_what_needs_no_engine_is_answered_by_who_does_not_serve() -> None:
    """Health keeps inference away, not the question what is wrong."""
    with (
        FakeServer(serving=False) as one,
        FakeServer(serving=False) as other,
        Client([one.address, other.address], attempts_max=1) as client,
    ):
        assert client.server_info(timeout_s=LIMIT_S).version == "9.9"
        assert client.health(timeout_s=LIMIT_S) == "NOT_SERVING"
        assert client.health("unknown", timeout_s=LIMIT_S) == "SERVICE_UNKNOWN"
        with pytest.raises(errors.UnavailableError):
            client.complete("x", timeout_s=LIMIT_S)
    assert not all_requests([one, other])


def test_each_change_of_health_is_told() -> None:
    """The present state first; leaving the loop ends the watch."""
    with FakeServer() as server, Client(server.address) as client:
        states = client.watch_health()
        assert next(states) == "SERVING"
        server.set_serving(False)
        assert next(states) == "NOT_SERVING"
        states.close()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------------- resume


@BOTH
@pytest.mark.parametrize("breaks", [[3], [1, 1, 1], [9], [0, 4]])
def test_a_broken_stream_goes_on_unbroken(kind: str, breaks: list[int]) -> None:
    """Whatever the place and number of the breaks: the text and the tokens of an undisturbed stream, the prompt once,
    one finish, one usage for all; each attempt is given what has been had, and the seed.
    """
    with FakeServer() as server:
        undisturbed = read(kind, server.address, with_token_ids=True)
    with FakeServer(*(Attempt(number, GONE) for number in breaks)) as server:
        deltas = read(kind, server.address, with_token_ids=True, resume=True)
    assert text(deltas) == text(undisturbed) == TEN_WORDS
    tokens = [token.id for delta in deltas for token in delta.tokens]
    assert tokens == [FIRST_TOKEN + position for position in range(10)]
    assert [delta.prompt for delta in deltas if delta.prompt] == [undisturbed[0].prompt]
    assert deltas[0].prompt is not None
    assert [delta.finish for delta in deltas if delta.finish] == [undisturbed[-1].finish]
    assert [delta.usage for delta in deltas if delta.usage] == [undisturbed[-1].usage]
    assert len({delta.request_id for delta in deltas}) == 1
    had = 0
    for request, number in zip(server.requests[1:], breaks, strict=True):
        had += number
        assert len(request.resume_token_ids) == had
        assert request.sampling.HasField("seed") == bool(had)
        assert request.sampling.seed == (SEED if had else 0)
        assert request.request_id == server.requests[0].request_id


@BOTH
def test_tokens_that_nobody_asked_for_are_not_shown(kind: str) -> None:
    """The stream is the one that its caller would have had without resume."""
    with FakeServer() as server:
        undisturbed = read(kind, server.address)
    with FakeServer(Attempt(4, GONE)) as server:
        deltas = read(kind, server.address, resume=True)
    assert [(delta.text, delta.tokens, delta.usage) for delta in deltas] == [
        (delta.text, delta.tokens, delta.usage) for delta in undisturbed
    ]


@BOTH
def test_it_goes_on_elsewhere(kind: str) -> None:
    """When its server stops for good, the other one has the rest; the caller notices nothing."""
    with FakeServer(Attempt(6, hang=True)) as one, FakeServer(Attempt(6, hang=True)) as other:
        first_to_go = threading.Thread(target=lambda: stop_the_one_that_hangs(one, other))
        first_to_go.start()
        deltas = read(kind, f"{one.address},{other.address}", resume=True)
        first_to_go.join(LIMIT_S)
        assert text(deltas) == TEN_WORDS
        assert {one.num_calls, other.num_calls} == {1}


def stop_the_one_that_hangs(one: FakeServer, other: FakeServer) -> None:
    """Once its tokens are out; the other one will not hang."""
    until(lambda: one.hanging.is_set() or other.hanging.is_set())
    hangs, waits = (one, other) if one.hanging.is_set() else (other, one)
    waits.left.set()
    time.sleep(0.2)  # for the tokens to be read
    hangs.stop()


@BOTH
def test_without_resume_a_break_is_the_callers(kind: str) -> None:
    """It has had what it has had, and is told; nothing is sent again behind its back."""
    with FakeServer(Attempt(3, GONE)) as server:
        assert isinstance(fails(kind, server.address), errors.UnavailableError)
    assert server.num_calls == 1


@BOTH
def test_a_stream_that_breaks_again_and_again_is_given_up(kind: str) -> None:
    """So that a request that takes servers down does not take them all."""
    with FakeServer(*[Attempt(1, GONE)] * 20) as server:
        error = fails(kind, server.address, resume=Resume(breaks_max=3))
    assert isinstance(error, errors.UnavailableError)
    assert server.num_calls == 4


@BOTH
def test_another_models_continuation_is_refused(kind: str) -> None:
    """Another length of the same prompt: half an answer of each model would be none."""
    with FakeServer(Attempt(3, GONE), Attempt(prompt_tokens=PROMPT_TOKENS + 1)) as server:
        assert isinstance(fails(kind, server.address, resume=True), errors.ResumeMismatchError)


@BOTH
def test_a_stream_cut_off_with_ok_is_no_answer(kind: str) -> None:
    """What ends well but before its end is an error, or goes on."""
    with FakeServer(Attempt(3), Attempt(2)) as server:
        assert isinstance(fails(kind, server.address), errors.IncompleteStreamError)
        assert text(read(kind, server.address, resume=True)) == TEN_WORDS


# ------------------------------------------------------------------------------------------- deadlines and cancellation


@pytest.mark.slow
@BOTH
def test_the_deadline_bounds_all_attempts(kind: str) -> None:
    """A stream that hangs after its break is ended by the one deadline that its caller gave."""
    with FakeServer(Attempt(3, GONE), Attempt(2, hang=True)) as server:
        began_s = time.monotonic()
        error = fails(kind, server.address, resume=True, timeout_s=1.5)
        assert isinstance(error, errors.DeadlineExceededError)
        assert time.monotonic() - began_s >= 1.5
        assert server.left.wait(LIMIT_S)


def sync_break(server: FakeServer) -> None:
    with Client(server.address) as client:
        for _ in client.generate("x"):
            break
        assert server.left.wait(LIMIT_S)


def sync_close(server: FakeServer) -> None:
    """From another thread, while the reader waits."""
    with Client(server.address) as client:
        stream = client.generate("x")
        closer = threading.Thread(target=lambda: (server.hanging.wait(LIMIT_S), stream.close()))
        closer.start()
        with pytest.raises(errors.RequestCancelledError):
            list(stream)
        assert server.left.wait(LIMIT_S)
        with pytest.raises(errors.RequestCancelledError):
            next(stream)
        closer.join()


def sync_error_in_the_loop(server: FakeServer) -> None:
    with Client(server.address) as client:

        def fail() -> None:
            with client.generate("x") as stream:
                next(stream)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert server.left.wait(LIMIT_S)


def sync_unread(server: FakeServer) -> None:
    """A stream that nobody reads is begun, and ended when it is forgotten."""
    with Client(server.address) as client:
        stream = client.generate("x")
        assert server.hanging.wait(LIMIT_S)
        del stream
        gc.collect()
        assert server.left.wait(LIMIT_S)


def aio_break(server: FakeServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            async for _ in client.generate("x"):
                break
            assert await asyncio.to_thread(server.left.wait, LIMIT_S)

    asyncio.run(scenario())


def aio_task_cancel(server: FakeServer) -> None:
    """asyncio's own CancelledError comes through, as it must."""

    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            task = asyncio.ensure_future(client.generate("x").answer())
            assert await asyncio.to_thread(server.hanging.wait, LIMIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.left.wait, LIMIT_S)

    asyncio.run(scenario())


def aio_timeout(server: FakeServer) -> None:
    """asyncio.timeout ends it as it ends anything else."""

    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.generate("x").answer()
            assert await asyncio.to_thread(server.left.wait, LIMIT_S)

    asyncio.run(scenario())


def aio_close(server: FakeServer) -> None:
    """By another task, while the reader waits: the reader's own task is not cancelled, so it is told otherwise."""

    async def scenario() -> None:
        async with AsyncClient(server.address) as client:
            stream = client.generate("x")
            task = asyncio.ensure_future(stream.answer())
            assert await asyncio.to_thread(server.hanging.wait, LIMIT_S)
            stream.close()
            with pytest.raises(errors.RequestCancelledError):
                await task
            assert await asyncio.to_thread(server.left.wait, LIMIT_S)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "leave",
    [
        sync_break,
        sync_close,
        sync_error_in_the_loop,
        sync_unread,
        aio_break,
        aio_task_cancel,
        aio_timeout,
        aio_close,
    ],
)
def test_leaving_a_stream_cancels_the_call(leave: Callable[[FakeServer], None]) -> None:
    """Whichever way it is left, the server knows at once."""
    with FakeServer(Attempt(1, hang=True)) as server:
        leave(server)


@BOTH
def test_closing_while_a_stream_waits_to_go_on(kind: str) -> None:
    """Between two attempts there is no call to cancel: the pause itself ends, and no other attempt is made."""
    end = End(CODES.UNAVAILABLE, "DRAINING", pushback_ms=3_600_000)
    patient = Resume(outage_s_max=7200.0)
    with FakeServer(Attempt(1, end)) as server:

        async def scenario() -> None:
            async with AsyncClient(server.address) as client:
                stream = client.generate("x", resume=patient)
                task = asyncio.ensure_future(stream.answer())
                await asyncio.to_thread(until, lambda: stream.num_resumes == 1)
                stream.close()
                with pytest.raises(errors.RequestCancelledError):
                    await task

        if kind == "aio":
            asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
        else:
            with Client(server.address) as client:
                stream = client.generate("x", resume=patient)
                closer = threading.Thread(target=lambda: (until(lambda: stream.num_resumes == 1), stream.close()))
                closer.start()
                with pytest.raises(errors.RequestCancelledError):
                    stream.answer()
                closer.join()
    assert server.num_calls == 1


@BOTH
def test_closing_the_client_ends_a_call_that_waits(kind: str) -> None:
    """Its caller is told so. Under asyncio gRPC raises CancelledError for it; nobody has cancelled the task."""
    with FakeServer(Attempt(hang=True)) as server:

        async def scenario() -> None:
            client = AsyncClient(server.address)
            task = asyncio.ensure_future(client.complete("x"))
            assert await asyncio.to_thread(server.hanging.wait, LIMIT_S)
            await client.close()
            with pytest.raises(errors.RequestCancelledError):
                await task

        if kind == "aio":
            asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
        else:
            client = Client(server.address)
            closer = threading.Thread(target=lambda: (server.hanging.wait(LIMIT_S), client.close()))
            closer.start()
            with pytest.raises(errors.RequestCancelledError):
                client.complete("x")
            closer.join()
        assert server.left.wait(LIMIT_S)


@BOTH
def test_a_server_that_says_cancelled(kind: str) -> None:
    """Under asyncio gRPC raises CancelledError for it; a task that nobody cancelled must not see that."""
    with FakeServer(Attempt(1, End(CODES.CANCELLED))) as server:
        assert isinstance(fails(kind, server.address), errors.RequestCancelledError)


# ------------------------------------------------------------------------------------------------------------- the rest


@BOTH
def test_the_token_goes_with_every_call(kind: str) -> None:
    """Asked anew for each attempt, resumed ones included; a caller's own metadata beside it."""
    tokens = iter(["one", "two"])
    with FakeServer(Attempt(2, GONE)) as server:
        settings = {"token": lambda: next(tokens)}
        read(kind, server.address, settings=settings, resume=True, metadata=[("x-mine", "m")])
    assert [sent["authorization"] for sent in server.metadata] == ["Bearer one", "Bearer two"]
    assert [sent["x-mine"] for sent in server.metadata] == ["m", "m"]


def test_many_threads_share_a_client() -> None:
    """Each has its own stream, whole, though every one of them breaks."""
    with FakeServer(*[Attempt(3, GONE)] * 16) as server, Client(server.address, resume=True) as client:
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda: found.append(client.generate("x", timeout_s=LIMIT_S).answer().text))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert found == [TEN_WORDS] * 12


def test_the_two_are_twins() -> None:
    """What one client can, the other can, by the same names and the same arguments."""

    def shape(kind: type) -> dict[str, list[tuple[str, Any, Any]]]:
        methods = {name: method for name, method in vars(kind).items() if inspect.isfunction(method)}
        return {
            name.replace("__a", "__"): [(p.name, p.kind, p.default) for p in inspect.signature(m).parameters.values()]
            for name, m in methods.items()
        }

    assert shape(Client) == shape(AsyncClient)


@BOTH
def test_every_other_call(kind: str) -> None:
    """Arguments arrive in their fields, absent ones do not, and answers come back as they are."""
    expected: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
        ("tokenize", ("abc",), {}, results.Tokenization((0, 1, 2, 3), (), 99)),
        (
            "tokenize",
            ("abc",),
            {"add_special_tokens": False, "with_pieces": True},
            results.Tokenization((0, 1, 2), ("p", "p", "p"), 99),
        ),
        ("tokenize", (), {"chat": [("user", "u")]}, results.Tokenization((0, 1), (), 99)),
        ("detokenize", ([5, 6],), {}, "[5, 6] None"),
        ("detokenize", ((),), {"skip_special_tokens": False}, "[] False"),
        ("model_info", (), {"model": "m"}, info_pb2.GetModelInfoResponse(model="m")),
        ("server_info", (), {}, info_pb2.GetServerInfoResponse(version="9.9")),
        ("load", (), {}, info_pb2.GetLoadResponse()),
        ("health", (), {}, "SERVING"),
        ("abort", ("live one", "gone"), {}, {"live one": True, "gone": False}),
        ("drain", (), {}, 7),
        ("drain", (0,), {}, 0),
        ("drain", (1.5,), {}, 1500),
    ]
    with FakeServer() as server:
        if kind == "sync":
            with Client(server.address, timeout_s=LIMIT_S) as client:
                told = [getattr(client, name)(*args, **options) for name, args, options, _ in expected]
        else:

            async def ask() -> list[Any]:
                async with AsyncClient(server.address, timeout_s=LIMIT_S) as client:
                    return [await getattr(client, name)(*args, **options) for name, args, options, _ in expected]

            told = asyncio.run(ask())
    assert told == [answer for *_, answer in expected]


@BOTH
def test_complete(kind: str) -> None:
    """The whole answer, tried again from the begin where its server says so."""
    with FakeServer(Attempt(0, GONE)) as server:
        if kind == "sync":
            with Client(server.address) as client:
                answer = client.complete("x", with_token_ids=True, timeout_s=LIMIT_S)
        else:

            async def ask() -> results.Answer:
                async with AsyncClient(server.address) as client:
                    return await client.complete("x", with_token_ids=True, timeout_s=LIMIT_S)

            answer = asyncio.run(ask())
    (completion,) = answer.completions
    assert answer.text == completion.text == TEN_WORDS
    assert [token.id for token in completion.tokens] == [FIRST_TOKEN + position for position in range(10)]
    assert completion.finish.reason == "MAX_TOKENS"
    assert answer.usage == results.Usage(PROMPT_TOKENS, 10, 3)
    assert answer.prompt == results.Prompt(PROMPT_TOKENS, 3, SEED)
