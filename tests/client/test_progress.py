"""When a broken stream goes on, with what, and what its caller is shown. No gRPC calls: one decision after another."""

from __future__ import annotations

import grpc
import pytest

from emberline.client import Resume, errors
from emberline.client._progress import Progress
from emberline.client.errors import Details, EmberlineError
from emberline.v1 import inference_pb2

CODES = grpc.StatusCode
DEFAULT = Resume()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(
    clock: Clock | None = None, *, resume: Resume | None = DEFAULT, has_others: bool = False, **fields: object
) -> Progress:
    request = inference_pb2.GenerateRequest(text="x", **fields)
    return Progress(request, resume, has_others=has_others, clock=clock or Clock(), jitter=lambda: 0.5)


def message(*token_ids: int, prompt: bool = False, seed: int = 7, completion: int | None = None, text: str = "t"):
    made = inference_pb2.GenerateResponse(
        text=text, tokens=[inference_pb2.Token(id=token_id) for token_id in token_ids]
    )
    if prompt:
        made.prompt.count, made.prompt.seed, made.prompt.cached = 4, seed, 2
    if completion is not None:
        made.finish.reason = inference_pb2.FINISH_REASON_EOS
        made.usage.prompt, made.usage.completion, made.usage.cached = 4, completion, 3
    return made


def unavailable(**details: object) -> EmberlineError:
    return errors.UnavailableError(CODES.UNAVAILABLE, "gone", Details(**details))  # type: ignore[arg-type]


def test_the_first_request_asks_for_what_going_on_needs() -> None:
    """Token ids, one label for all attempts, and a replay by the server itself; never against the caller's word."""
    request = make().request()
    assert request.output.token_ids
    assert request.resume_on_engine_death
    assert len(request.request_id) == 32
    request = make(request_id="mine", resume_on_engine_death=False).request()
    assert request.request_id == "mine"
    assert not request.resume_on_engine_death


def test_without_resume_nothing_is_changed_or_sent_again() -> None:
    """The request goes out as it came, and every error is the caller's."""
    progress = make(resume=None)
    assert progress.request() == inference_pb2.GenerateRequest(text="x")
    progress.take(message(1, prompt=True))
    with pytest.raises(errors.UnavailableError):
        progress.after(unavailable())


def test_it_goes_on_behind_the_tokens_had() -> None:
    """The next request has the seed that was told and the caller's resumed tokens, then those had, in order; nothing
    that the first attempt has settled is asked again.
    """
    progress = make(resume_token_ids=[5, 6], sampling={"temperature": 1.0}, output={"prompt_logprobs": 1})
    progress.take(message(7, prompt=True, seed=2**64 - 1))
    progress.take(message(8, 9))
    progress.after(unavailable())
    request = progress.request()
    assert list(request.resume_token_ids) == [5, 6, 7, 8, 9]
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.temperature == 1.0
    assert not request.output.HasField("prompt_logprobs")


def test_the_caller_sees_one_stream() -> None:
    """The prompt once, tokens only if asked for, and usage over all attempts with the cached tokens of the first."""
    progress = make()
    first = progress.take(message(1, 2, prompt=True))
    assert first is not None
    assert first.HasField("prompt")
    assert not first.tokens
    progress.after(unavailable())
    progress.request()
    second = progress.take(message(3, prompt=True))
    assert second is not None
    assert not second.HasField("prompt")
    last = progress.take(message(4, completion=2))
    assert last is not None
    assert (last.usage.prompt, last.usage.completion, last.usage.cached) == (4, 4, 2)
    assert progress.is_finished


def test_a_message_of_tokens_alone_is_not_shown_to_who_did_not_ask() -> None:
    """Text may lag behind tokens; a delta without anything is none."""
    progress = make()
    progress.take(message(1, prompt=True))
    assert progress.take(message(2, text="")) is None
    progress = make(output={"token_ids": True})
    progress.take(message(1, prompt=True))
    shown = progress.take(message(2, text=""))
    assert shown is not None
    assert [token.id for token in shown.tokens] == [2]


@pytest.mark.parametrize("changed", [{"count": 5}, {"seed": 8}])
def test_another_model_does_not_go_on(changed: dict[str, int]) -> None:
    """A server for which the same prompt has another length, or that takes another seed, is not like the first."""
    progress = make()
    progress.take(message(1, prompt=True))
    progress.after(unavailable())
    other = message(2, prompt=True)
    for name, value in changed.items():
        setattr(other.prompt, name, value)
    with pytest.raises(errors.ResumeMismatchError):
        progress.take(other)


def test_pushback_minus_one_is_final() -> None:
    """A suspect is never sent again, and the error says so."""
    progress = make()
    progress.take(message(1, prompt=True))
    with pytest.raises(errors.UnavailableError) as told:
        progress.after(unavailable(may_retry=False))
    assert not told.value.may_retry


@pytest.mark.parametrize(
    ("code", "reason", "at_first", "later"),
    [
        (CODES.UNAVAILABLE, "", True, True),
        (CODES.UNAVAILABLE, "DRAINING", True, True),
        (CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL", False, True),
        (CODES.RESOURCE_EXHAUSTED, "SLOW_READER", False, False),
        (CODES.RESOURCE_EXHAUSTED, "", False, False),
        (CODES.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", False, True),
        (CODES.INTERNAL, "POISON_REQUEST", False, False),
        (CODES.INTERNAL, "", False, False),
        (CODES.DEADLINE_EXCEEDED, "", False, False),
        (CODES.ABORTED, "", False, False),
        (CODES.CANCELLED, "", False, False),
        (CODES.UNKNOWN, "", False, False),
        (CODES.INVALID_ARGUMENT, "", False, False),
    ],
)
def test_after_which_errors_it_goes_on(code: grpc.StatusCode, reason: str, at_first: bool, later: bool) -> None:
    """Only after what says nothing against the request; a full queue is waited for only by a stream that has begun."""
    for is_later, goes_on in ((False, at_first), (True, later)):
        progress = make()
        if is_later:
            progress.take(message(1, prompt=True))
        error = EmberlineError(code, "told", Details(reason=reason))
        if goes_on:
            progress.after(error)
        else:
            with pytest.raises(EmberlineError):
                progress.after(error)


def test_pauses_grow_and_start_anew() -> None:
    """From a tenth of a second (half of it, with this jitter) up to two; a message ends the series."""
    progress = make()
    progress.take(message(1, prompt=True))
    delays = [progress.after(unavailable()) for _ in range(7)]
    assert delays == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    progress.take(message(2))
    assert progress.after(unavailable()) == pytest.approx(0.05)


def test_pushback_is_waited_for() -> None:
    """In full where there is one server, or where it is about the load. Where others serve, UNAVAILABLE's is only about
    the one that said it, which the channel leaves out.
    """
    full = errors.QueueFullError(CODES.RESOURCE_EXHAUSTED, "full", Details(reason="QUEUE_FULL", retry_after_s=3.0))
    for has_others, after_death in ((False, 4.05), (True, 0.05)):
        progress = make(has_others=has_others)
        progress.take(message(1, prompt=True))
        assert progress.after(unavailable(retry_after_s=4.0)) == pytest.approx(after_death)
        assert progress.after(full) == pytest.approx(3.1)


def test_an_outage_is_bounded() -> None:
    """Nothing for longer than `outage_s_max` ends it, with the error that came last; a message starts the time anew. A
    stream of which nothing has come has `start_s_max`.
    """
    clock = Clock()
    progress = make(clock, resume=Resume(outage_s_max=10.0, start_s_max=1.0))
    progress.after(unavailable())
    clock.now_s += 1.1
    with pytest.raises(errors.UnavailableError):
        progress.after(unavailable())
    progress = make(clock, resume=Resume(outage_s_max=10.0))
    for _ in range(3):
        progress.take(message(1, prompt=progress.num_tokens == 0))
        progress.after(unavailable())
        clock.now_s += 9.0
        progress.after(unavailable())
    clock.now_s += 2.0
    last = unavailable()
    with pytest.raises(errors.UnavailableError) as told:
        progress.after(last)
    assert told.value is last
    assert told.value.__notes__ == ["3 attempts have failed within 11.0 s"]


def test_a_stream_that_keeps_breaking_is_given_up() -> None:
    """After `breaks_max` breaks, however much comes between them: it may be what takes the servers down."""
    progress = make(resume=Resume(breaks_max=2))
    for number in range(2):
        progress.take(message(number, prompt=number == 0))
        progress.after(unavailable())
        progress.after(unavailable())  # of the same outage
    progress.take(message(9))
    with pytest.raises(errors.UnavailableError):
        progress.after(unavailable())


def test_time_limits_go_on_counting() -> None:
    """`max_time` is from the first attempt's begin; once it is over nothing is sent. `max_queue_time` was for the first
    step, which has been; until then it stays.
    """
    clock = Clock()
    progress = make(clock, max_time={"seconds": 10}, max_queue_time={"seconds": 1})
    progress.after(unavailable())
    assert progress.request().max_queue_time.seconds == 1
    progress.take(message(1, prompt=True))
    clock.now_s += 7.5
    progress.after(unavailable())
    request = progress.request()
    assert request.max_time.ToNanoseconds() == 2_500_000_000
    assert not request.HasField("max_queue_time")
    clock.now_s += 2.5
    with pytest.raises(errors.DeadlineExceededError):
        progress.request()


def test_several_sequences_are_refused() -> None:
    """The protocol cannot resume n > 1; better told before the first break than at it."""
    with pytest.raises(ValueError, match="n > 1"):
        make(sampling={"n": 2})


@pytest.mark.parametrize("bounds", [{"outage_s_max": -1}, {"breaks_max": -1}, {"start_s_max": -1}])
def test_bounds_must_not_be_negative(bounds: dict[str, int]) -> None:
    """They would end the first mending in a way that looks like a failure of the server."""
    with pytest.raises(ValueError, match="negative"):
        Resume(**bounds)
