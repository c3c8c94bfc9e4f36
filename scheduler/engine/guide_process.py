"""The guide compiler's process: `python -m scheduler.engine.guide_process --socket-fd N`.

What lives here: the edges of the process, and a process of its own for each compilation, with its limits. What must
not: what guides mean (`scheduler/model/guided/`), the queue, the cache, what callers are told (the front end's).

Nothing can stop a compilation but the end of its process. So this one does what all need, once (imports, the
vocabulary), compiles nothing itself, and forks for each guide a job that may be ended by the kernel at any moment:

- CPU time by a timer whose signal, SIGPROF, nothing in the job can catch; elapsed time, for a job that waits, by us;
- memory by RLIMIT_AS, counted from what this process has when it forks; the stack by its own limit;
- never before the engine: it runs niced, and is the kernel's first choice when memory runs out.

A job writes its answer to a file in memory and ends; only then is it read. What the library prints quotes the guide, so
it goes to nobody; that there was something is what `compile_guide` needs to know. This process has one thread, so
forking is safe; a job never returns from the fork.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from scheduler.codec import FrameDecoder, encode
from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideOutcome,
    GuideSource,
)

if TYPE_CHECKING:
    from collections.abc import Callable

JOB_MEMORY_BYTES_MAX = 256 * 1024 * 1024
"""Beyond what this process has."""
JOB_NICENESS = 10
MESSAGE_CHARS_MAX = 500
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 64 * 1024


@dataclass(slots=True)
class _Job:
    job_id: int
    pid: int
    pid_fd: int
    answer_fd: int
    deadline_s: float
    is_overdue: bool = False


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Compile guides until the front end is gone."""
    begun_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="scheduler.engine.guide_process")
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    _guard_process()
    connection = socket.socket(fileno=arguments.socket_fd)
    decoder = FrameDecoder()
    config, early = _receive_config(connection, decoder)
    try:
        compile_source = _load(config)
    except BaseException as error:  # noqa: BLE001 - told to whoever started us, and the end
        name = type(error).__qualname__
        failure = GuideCompilerFailed(
            exception_type=f"{type(error).__module__}.{name}",
            message=str(error)[:MESSAGE_CHARS_MAX],
            is_unsupported=name == "UnsupportedVocabularyError",  # its module may be what cannot be imported
        )
        connection.sendall(encode(failure))
        os._exit(1)
    gc.collect()
    gc.freeze()  # what jobs share with us is not written to by their collector
    connection.sendall(encode(GuideCompilerReady(os.getpid(), time.monotonic() - begun_s)))
    _Foreman(connection, decoder, config, compile_source).run(early)


def _guard_process() -> None:
    """As an engine: no core dumps, no outliving the parent, no share in its signals to stop."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere end of file on the socket must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _receive_config(connection: socket.socket, decoder: FrameDecoder) -> tuple[GuideCompilerConfig, list[Any]]:
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            os._exit(0)
        if messages := decoder.feed(data):
            config = messages[0]
            if not isinstance(config, GuideCompilerConfig):
                raise TypeError(f"the first message is the configuration, not {type(config).__name__}")
            return config, list(messages[1:])


def _load(config: GuideCompilerConfig) -> Callable[[GuideSource, Callable[[], bool]], bytes]:
    """Imports and vocabulary: most of this process's memory, and a second or two."""
    # Only now: an interpreter that lacks them can still tell so.
    from scheduler.model.guided.compiler import compile_guide  # noqa: PLC0415 - see above
    from scheduler.model.guided.vocabulary import Vocabularies, read_vocabulary  # noqa: PLC0415 - see above

    vocabulary = read_vocabulary(config.model, config.revision, config.vocab_size)
    vocabularies = Vocabularies(vocabulary, config.eos_token_ids)
    return lambda source, has_warned: compile_guide(source, vocabularies, has_warned)


class _Foreman:
    """Takes guides in, has them compiled, tells what became of them."""

    def __init__(
        self,
        connection: socket.socket,
        decoder: FrameDecoder,
        config: GuideCompilerConfig,
        compile_source: Callable[[GuideSource, Callable[[], bool]], bytes],
    ) -> None:
        self._connection = connection
        self._decoder = decoder
        self._config = config
        self._compile_source = compile_source
        self._jobs: dict[int, _Job] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, early: Sequence[Any]) -> NoReturn:
        """`early`: messages that have been received already."""
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._take(early)
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.data is None:
                    data = self._connection.recv(_READ_BYTES)
                    if not data:
                        self._leave()
                    self._take(self._decoder.feed(data))
                else:
                    self._end(key.data)
            self._kill_overdue()

    def _take(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if not isinstance(message, CompileGuide):
                raise TypeError(f"a guide compiler is not told {type(message).__name__}")
            self._begin(message)

    def _begin(self, message: CompileGuide) -> None:
        answer_fd = os.memfd_create("emberline-guide", os.MFD_CLOEXEC)
        address_space_bytes = _address_space_bytes()
        pid = os.fork()
        if pid == 0:
            try:
                self._connection.close()
                _limit_job(address_space_bytes, self._config.timeout_s)
                _do_job(message, self._compile_source, answer_fd)
            finally:
                os._exit(1)
        deadline_s = time.monotonic() + self._config.elapsed_timeout_s
        job = _Job(message.job_id, pid, os.pidfd_open(pid), answer_fd, deadline_s)
        self._jobs[job.job_id] = job
        self._selector.register(job.pid_fd, selectors.EVENT_READ, job)

    def _end(self, job: _Job) -> None:
        self._selector.unregister(job.pid_fd)
        _, status = os.waitpid(job.pid, 0)
        with os.fdopen(job.answer_fd, "rb") as file:
            file.seek(0)
            answer = file.read()
        os.close(job.pid_fd)
        del self._jobs[job.job_id]
        if status != 0:
            answer = encode(GuideCompiled(job.job_id, _outcome_of(status, is_overdue=job.is_overdue)))
        try:
            self._connection.sendall(answer)
        except OSError:
            self._leave()

    def _kill_overdue(self) -> None:
        now_s = time.monotonic()
        for job in self._jobs.values():
            if now_s >= job.deadline_s and not job.is_overdue:
                job.is_overdue = True
                os.kill(job.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def _timeout_s(self) -> float | None:
        deadlines = [job.deadline_s for job in self._jobs.values() if not job.is_overdue]
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _leave(self) -> NoReturn:
        """The front end is gone; jobs go with us."""
        for job in self._jobs.values():
            os.kill(job.pid, signal.SIGKILL)
        os._exit(0)


def _outcome_of(status: int, *, is_overdue: bool) -> GuideOutcome:
    """Of a job that did not come to its end."""
    if is_overdue or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return GuideOutcome.TIME
    # What remains is an allocation that was refused where C++ cannot raise (SIGABRT), a stack at its end (SIGSEGV), or
    # the kernel's own choice (SIGKILL): all of them memory.
    return GuideOutcome.MEMORY


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - no import between here and the fork
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit_job(address_space_bytes: int, timeout_s: float) -> None:
    _end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(JOB_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - as above
        file.write("1000")
    most = address_space_bytes + JOB_MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)


def _do_job(
    message: CompileGuide, compile_source: Callable[[GuideSource, Callable[[], bool]], bytes], answer_fd: int
) -> None:
    """In the job; ends its process."""
    from scheduler.model.guided.compiler import GuideRefusedError  # noqa: PLC0415 - loaded by now

    warnings_fd = os.memfd_create("emberline-guide-warnings", os.MFD_CLOEXEC)
    os.dup2(warnings_fd, 1)
    os.dup2(warnings_fd, 2)
    try:
        guide = compile_source(message.source, lambda: os.fstat(warnings_fd).st_size > 0)
        answer = GuideCompiled(message.job_id, GuideOutcome.COMPILED, guide)
    except GuideRefusedError as refusal:
        answer = GuideCompiled(message.job_id, refusal.outcome, what=refusal.what)
    except MemoryError:
        answer = GuideCompiled(message.job_id, GuideOutcome.MEMORY)
    os.write(answer_fd, encode(answer))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
