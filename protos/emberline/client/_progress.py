"""One stream over all its attempts: what its caller has had, and what to do when an attempt breaks.

What lives here: decisions. What must not: gRPC calls, sleeping; the clock and the jitter are handed in. `sync.py` and
`aio.py` act on it in the same way:

    progress.request()          what to send now: the caller's request, or one that goes on behind the tokens had
    progress.take(message)      the message as the caller shall see it, or None if it has nothing for them
    progress.after(error)       how long to wait before the next attempt; raises what the caller shall see instead

How a stream goes on. The request asks for token ids, whatever its caller wants, and a broken one is sent again with
the seed that the first message told and `resume_token_ids`: the server then sends what would have followed. What had
been sent at the break is a function of the tokens so far, so text that the server still held back (half a character,
the begin of a stop string) comes with the next attempt. The caller sees one stream: `prompt` once, `usage` as the sum,
no token twice.

When it goes on. UNAVAILABLE breaks a stream: its server died, was stopped or cannot be reached. Whoever answers next
goes on, be it another server or the same one. Three things bound it: how long nothing comes (`outage_s_max`), how often
it breaks (`breaks_max`: a request that takes one server after another with it is no victim), and the call's deadline.

What is never sent again: pushback −1. The server says it of a request that was in the step in which its engine died,
since it may be the killer, and another server would know nothing of that. So that such a stream goes on nevertheless,
the request asks its server to replay it (`resume_on_engine_death`, unless the caller says otherwise): the server knows
who is under suspicion, runs it alone and convicts the killer. It is the one place where that is safe.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from emberline.client import errors
from emberline.client.request import duration
from emberline.v1 import inference_pb2

BACKOFF_S = 0.1
BACKOFF_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Resume:
    """How far a broken stream is carried on."""

    outage_s_max: float = 120.0
    """The longest time without anything new, from the break to the next message."""
    breaks_max: int = 8
    """Times that a stream may break."""
    start_s_max: float = 15.0
    """The same as `outage_s_max` for a stream of which nothing has come yet."""

    def __post_init__(self) -> None:
        if self.outage_s_max < 0 or self.breaks_max < 0 or self.start_s_max < 0:
            raise ValueError("the bounds of a resume must not be negative")


class Progress:
    """Not for several threads at once."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        resume: Resume | None,
        *,
        has_others: bool,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        """`request` becomes ours. `has_others`: the channel leaves out servers that do not serve. `jitter` draws from
        [0, 1). Raises ValueError for a request that cannot be resumed.
        """
        self.is_finished = False
        """The stream's last message has come."""
        self.num_resumes = 0
        """Attempts after the first one."""
        self._request = request
        self._resume = resume
        self._has_others = has_others
        self._clock = clock
        self._jitter = jitter
        self._began_s = clock()
        self._wants_tokens = request.output.token_ids or request.output.HasField("logprobs")
        self._held: list[int] = []
        self._num_before = 0
        """Of the tokens held, those of earlier attempts."""
        self._prompt: inference_pb2.PromptInfo | None = None
        self._outage_began_s: float | None = None
        self._num_failures = 0
        """Since the last message."""
        self._num_breaks = 0
        if resume is not None:
            self._prepare()

    def _prepare(self) -> None:
        request = self._request
        if request.sampling.n > 1:
            raise ValueError("n > 1 cannot be resumed: the protocol has resume_token_ids for one sequence only")
        if not request.HasField("request_id"):
            request.request_id = uuid.uuid4().hex  # one label over all attempts
        if not request.HasField("resume_on_engine_death"):
            request.resume_on_engine_death = True
        request.output.token_ids = True

    @property
    def num_tokens(self) -> int:
        """Tokens had so far."""
        return len(self._held)

    def request(self) -> inference_pb2.GenerateRequest:
        """What to send now. Raises DeadlineExceededError if max_time has passed."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        self._num_before = len(self._held)
        if self._prompt is None:
            return request
        request.sampling.seed = self._prompt.seed
        request.resume_token_ids.extend(self._held)
        request.output.ClearField("prompt_logprobs")  # they have come
        request.ClearField("max_queue_time")  # it was for the first step, which has been
        if request.HasField("max_time"):
            limit_s = request.max_time.seconds + request.max_time.nanos / 1e9
            left_s = limit_s - (self._clock() - self._began_s)
            if left_s <= 0:
                message = "max_time passed while the stream was broken"
                raise errors.DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            request.max_time.CopyFrom(duration(left_s))
        return request

    def take(self, message: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """The message, changed in place. Raises ResumeMismatchError where another server would not go on alike."""
        self._outage_began_s = None
        self._num_failures = 0
        if self._resume is not None:
            self._held.extend(token.id for token in message.tokens)
            if message.HasField("prompt"):
                self._take_prompt(message)
            if not self._wants_tokens:
                message.ClearField("tokens")
            if message.HasField("usage") and self._prompt is not None:
                message.usage.completion += self._num_before
                message.usage.cached = self._prompt.cached
        if message.HasField("usage"):
            self.is_finished = True
        has_something = message.text or message.tokens or any(map(message.HasField, ("prompt", "finish", "usage")))
        return message if has_something else None

    def _take_prompt(self, message: inference_pb2.GenerateResponse) -> None:
        if self._prompt is None:
            self._prompt = inference_pb2.PromptInfo()
            self._prompt.CopyFrom(message.prompt)
            self._prompt.ClearField("tokens")
            return
        if (message.prompt.count, message.prompt.seed) != (self._prompt.count, self._prompt.seed):
            raise errors.ResumeMismatchError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the prompt has {message.prompt.count} tokens there and had {self._prompt.count}",
            )
        message.ClearField("prompt")

    def after(self, error: errors.EmberlineError) -> float:
        """Seconds to wait before the next attempt; raises `error` if there is to be none."""
        resume = self._resume
        if resume is None or not self._goes_on_after(error):
            raise error
        now_s = self._clock()
        if self._outage_began_s is None:
            self._outage_began_s = now_s
            self._num_breaks += 1
        delay_s = self._delay_s(error)
        limit_s = resume.start_s_max if self._prompt is None else resume.outage_s_max
        if self._num_breaks > resume.breaks_max:
            error.add_note(f"the stream has broken {self._num_breaks} times; at most {resume.breaks_max} may be mended")
            raise error
        outage_s = now_s - self._outage_began_s
        if outage_s + delay_s > limit_s:
            if self._num_failures:
                error.add_note(f"{self._num_failures + 1} attempts have failed within {outage_s:.1f} s")
            raise error
        self._num_failures += 1
        self.num_resumes += 1
        return delay_s

    def _goes_on_after(self, error: errors.EmberlineError) -> bool:
        has_seed = self._prompt is not None or not self._held  # by the protocol; without it nobody could go on
        if not error.may_retry or not has_seed:
            return False
        match error.code:
            case grpc.StatusCode.UNAVAILABLE:
                return True
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                # Others have come first; a stream on its way waits its turn. The first attempt is for its caller.
                return error.reason == "QUEUE_FULL" and self._is_under_way
            case grpc.StatusCode.ALREADY_EXISTS:
                # The server has not noticed yet that the first attempt's connection is gone.
                return self._is_under_way
        return isinstance(error, errors.IncompleteStreamError)

    @property
    def _is_under_way(self) -> bool:
        return self._prompt is not None or self._outage_began_s is not None

    def _delay_s(self, error: errors.EmberlineError) -> float:
        """Jittered, so that the streams of a dead server do not come to the next one all in one moment."""
        ceiling_s: float = min(BACKOFF_S_MAX, BACKOFF_S * 2**self._num_failures)
        backoff_s = ceiling_s * self._jitter()
        if error.retry_after_s is None:
            return backoff_s
        if self._has_others and error.code is grpc.StatusCode.UNAVAILABLE:
            # It says when that server is back. The channel leaves it out until then, and others serve now.
            return min(backoff_s, error.retry_after_s)
        return error.retry_after_s + backoff_s
