"""Guides on their way from callers to engines: which are known, which are being compiled, which are refused.

What lives here: the queue, the cache, the memory of what overran, and the life of the compiler's process as far as
guides are concerned. What must not: processes as such (`guide_child.py`), what guides mean
(`scheduler/model/guided/compiler.py`), gRPC.

The process is started at the first guide that nobody has compiled before, so a server without guides never pays for it.
It compiles a few at a time, each in a process of its own with limits on time and memory; what overruns them ends there,
and whoever waits behind it is next. Callers who bring the same guide at once wait for the same compilation.

A guide that was refused is remembered for a while: a repeat costs nothing. One that was being compiled when the whole
process was lost (which is not how an overrun ends) goes to the next one, once; then it is taken for the cause.

Nothing here is an engine's death, and no user's text stays: known guides are found by a digest with a salt of this
process.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scheduler import logs
from scheduler.codec import Message
from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideKind,
    GuideMessage,
    GuideOutcome,
    GuideSource,
)
from service.errors import (
    CallError,
    FieldViolation,
    GuideLimitError,
    InternalError,
    InvalidRequestError,
    UnsupportedOptionError,
)

JOBS_AT_ONCE_MAX = 2
"""One that takes all its time leaves the other way open."""
JOBS_MAX = 64
"""Waiting or being compiled; callers of one guide share a job."""
CACHE_BYTES_MAX = 32 * 1024 * 1024
REFUSALS_MAX = 4096
REFUSED_FOR_S = 300.0
SENT_MAX = 2
START_S_MAX = 60.0
"""From a process's start until it is ready: imports and vocabulary, two seconds on a machine that is not busy."""
RESTART_AFTER_S = 5.0
"""From a process that could not start to the next attempt; guides meanwhile are answered at once."""
ELAPSED_PER_CPU_S = 8.0
"""A compilation is niced: on a busy machine it gets a part of a core."""
ELAPSED_S_MIN = 2.0
LATE_S = 5.0
"""Beyond what one job may take in the process: then it is the process that hangs."""

FIELD_OF = {
    GuideKind.JSON_SCHEMA: "guided.json_schema",
    GuideKind.JSON_OBJECT: "guided.json_object",
    GuideKind.REGEX: "guided.regex",
    GuideKind.GRAMMAR: "guided.grammar",
    GuideKind.CHOICE: "guided.choice",
}
_WHAT_IT_MUST_BE = {
    GuideKind.JSON_SCHEMA: "must be a JSON schema that some value fulfils",
    GuideKind.REGEX: "must be a regular expression, without look-around, back-references and word boundaries",
    GuideKind.GRAMMAR: "must be a grammar in GBNF whose rule `root` matches some text",
}
_UNSUPPORTED = "guided: this model's tokenizer is of a kind that guides cannot follow"
_LIMIT_OF = {GuideOutcome.TIME: "time", GuideOutcome.MEMORY: "memory", GuideOutcome.SIZE: "size"}


class Child(Protocol):
    """A started compiler process; `guide_child.py` is the real one."""

    def send(self, message: GuideMessage) -> None: ...

    def kill(self) -> None: ...


StartChild = Callable[[Callable[[Message], None], Callable[[], None]], Child]
"""Starts one, given whom to tell its messages and its loss. Raises OSError."""


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    digest: bytes
    source: GuideSource
    future: asyncio.Future[GuideCompiled]
    num_waiting: int = 0
    num_sent: int = 0
    is_overdue: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class GuideCompiler:
    """All methods belong to the event loop's thread."""

    def __init__(
        self,
        start_child: StartChild,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        salt: bytes,
        make_refusal: Callable[[], CallError],
    ) -> None:
        """`timeout_s`: CPU time of one compilation. `make_refusal`: for guides that find no place."""
        self._start_child = start_child
        self._timeout_s = timeout_s
        self._elapsed_timeout_s = ELAPSED_PER_CPU_S * timeout_s + ELAPSED_S_MIN
        self._clock = clock
        self._salt = salt
        self._make_refusal = make_refusal
        self._config: GuideCompilerConfig | None = None
        self._child: Child | None = None
        self._is_ready = False
        self._start_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._retry_at_s = 0.0
        self._failure_reason = ""
        self._is_unsupported = False
        self._jobs: dict[bytes, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._sent: dict[int, _Job] = {}
        self._num_jobs_ever = 0
        self._guides: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._refused: OrderedDict[bytes, tuple[GuideCompiled, float]] = OrderedDict()
        """Digest → what became of it, and when that is forgotten."""

    @property
    def num_jobs(self) -> int:
        """Guides that wait or are being compiled."""
        return len(self._jobs)

    def configure(self, *, model: str, revision: str | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """What the model is; known once an engine is ready. Only the first call counts: models do not change."""
        if self._config is None:
            self._config = GuideCompilerConfig(
                model=model,
                revision=revision,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                timeout_s=self._timeout_s,
                elapsed_timeout_s=self._elapsed_timeout_s,
            )

    def close(self) -> None:
        """End the process; whoever waits is told an internal error."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()

    async def compile(self, source: GuideSource) -> bytes:
        """What `Submit.guide` takes.

        Raises InvalidRequestError, UnsupportedOptionError, GuideLimitError, the refusal if there is no place, and
        InternalError if there is no compiler.
        """
        digest = self._digest(source)
        guide = self._guides.get(digest)
        if guide is not None:
            self._guides.move_to_end(digest)
            return guide
        refused = self._refused.get(digest)
        if refused is not None and self._clock() < refused[1]:
            raise _error_of(source, refused[0])
        answer = await self._answer(digest, source)
        if answer.outcome is not GuideOutcome.COMPILED:
            raise _error_of(source, answer)
        return answer.guide

    async def _answer(self, digest: bytes, source: GuideSource) -> GuideCompiled:
        job = self._jobs.get(digest)
        if job is None:
            if len(self._jobs) >= JOBS_MAX:
                raise self._make_refusal()
            if self._is_unsupported:
                raise UnsupportedOptionError([_UNSUPPORTED])
            if self._child is None and self._clock() < self._retry_at_s:
                raise _incident(self._failure_reason)
            self._num_jobs_ever += 1
            job = _Job(self._num_jobs_ever, digest, source, asyncio.get_running_loop().create_future())
            self._jobs[digest] = job
            self._queue.append(job)
            self._advance()
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.future)
        except _NoCompilerError as error:
            if self._is_unsupported:
                raise UnsupportedOptionError([_UNSUPPORTED]) from None
            raise _incident(error.reason) from None
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and job in self._queue:
                self._queue.remove(job)  # everybody has left before it began
                self._forget(job)

    # ------------------------------------------------------------------------------------------ jobs and the process

    def _advance(self) -> None:
        """Send what may be sent; start a process if there is none."""
        if self._is_closed or not self._queue:
            return
        if self._child is None:
            assert self._config is not None, "guides are let in once an engine is ready"
            self._is_ready, self._failure_reason = False, ""
            try:
                # In no call's context, or the process's own log lines would bear the first caller's name.
                self._child = contextvars.Context().run(self._start_child, self._on_message, self._on_lost)
            except OSError as error:
                self._fail_all(f"cannot start the process: {error.strerror}")
                return
            self._start_timer = asyncio.get_running_loop().call_later(START_S_MAX, self._on_start_overdue)
            self._child.send(self._config)
        while self._is_ready and self._queue and len(self._sent) < JOBS_AT_ONCE_MAX:
            job = self._queue.popleft()
            job.num_sent += 1
            self._sent[job.job_id] = job
            job.timer = asyncio.get_running_loop().call_later(self._elapsed_timeout_s + LATE_S, self._on_overdue, job)
            self._child.send(CompileGuide(job.job_id, job.source))

    def _on_message(self, message: Message) -> None:
        match message:
            case GuideCompilerReady():
                self._is_ready = True
                self._stop_start_timer()
                logs.get_logger().info("guide compiler ready", pid=message.pid, startup_s=round(message.startup_s, 2))
            case GuideCompiled():
                job = self._sent.pop(message.job_id, None)
                if job is not None:
                    self._finish(job, message)
            case GuideCompilerFailed():
                self._failure_reason = f"{message.exception_type}: {message.message}"
                self._is_unsupported = message.is_unsupported
            case _:
                raise TypeError(f"a guide compiler does not say {type(message).__name__}")
        self._advance()

    def _on_start_overdue(self) -> None:
        """It may never be ready, and no caller may wait for ever."""
        self._failure_reason = f"the process was not ready within {START_S_MAX:g} s"
        if self._child is not None:
            self._child.kill()

    def _stop_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None

    def _on_overdue(self, job: _Job) -> None:
        """The process is to end a job long before: it hangs."""
        job.is_overdue = True
        if self._child is not None:
            self._child.kill()

    def _on_lost(self) -> None:
        self._stop_start_timer()
        was_ready, self._child, self._is_ready = self._is_ready, None, False
        sent, self._sent = list(self._sent.values()), {}
        if self._is_closed:
            self._queue.extendleft(sent)
            self._fail_all("the server is stopping", is_news=False)
            return
        if not was_ready:
            self._fail_all(self._failure_reason or "the process ended before it was ready")
            return
        logs.get_logger().warning("guide compiler lost", num_jobs=len(sent))
        for job in reversed(sent):
            job.stop_timer()
            if job.is_overdue:
                self._finish(job, GuideCompiled(job.job_id, GuideOutcome.TIME))
            elif job.num_sent >= SENT_MAX:
                self._finish(job, GuideCompiled(job.job_id, GuideOutcome.MEMORY))
            else:
                self._queue.appendleft(job)
        self._advance()

    def _finish(self, job: _Job, answer: GuideCompiled) -> None:
        job.stop_timer()
        self._forget(job)
        job.future.set_result(answer)
        if answer.outcome is GuideOutcome.COMPILED:
            self._guides[job.digest] = answer.guide
            self._cached_bytes += len(answer.guide)
            while self._cached_bytes > CACHE_BYTES_MAX:
                _, oldest = self._guides.popitem(last=False)
                self._cached_bytes -= len(oldest)
            return
        self._refused[job.digest] = (answer, self._clock() + REFUSED_FOR_S)
        self._refused.move_to_end(job.digest)
        while len(self._refused) > REFUSALS_MAX:
            self._refused.popitem(last=False)

    def _fail_all(self, reason: str, *, is_news: bool = True) -> None:
        """There is no compiler to be had."""
        self._failure_reason = reason
        self._retry_at_s = self._clock() + RESTART_AFTER_S
        if is_news:
            logs.get_logger().error("no guide compiler", reason=reason)
        jobs, self._queue = list(self._queue), deque()
        for job in jobs:
            job.stop_timer()
            self._forget(job)
            job.future.set_exception(_NoCompilerError(reason))
            job.future.exception()  # looked at, should all who waited have left

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.digest, None)

    def _digest(self, source: GuideSource) -> bytes:
        return hashlib.blake2b(msgspec.msgpack.encode(source), key=self._salt, digest_size=16).digest()


class _NoCompilerError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _incident(reason: str) -> InternalError:
    """A fresh one for each call, and one line in the log."""
    incident_id = secrets.token_hex(8)
    logs.get_logger().error("guide not compiled", incident_id=incident_id, reason=reason)
    return InternalError(incident_id)


def _error_of(source: GuideSource, answer: GuideCompiled) -> CallError:
    """A fresh error for each call."""
    field_name = FIELD_OF[source.kind]
    if answer.outcome in _LIMIT_OF:
        return GuideLimitError(_LIMIT_OF[answer.outcome])
    if answer.outcome is GuideOutcome.UNSUPPORTED:
        return UnsupportedOptionError([f"{field_name}: {answer.what}"])
    must_be = _WHAT_IT_MUST_BE.get(source.kind, "cannot be followed with this model's vocabulary")
    return InvalidRequestError([FieldViolation(field_name, must_be)])
