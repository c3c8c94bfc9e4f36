"""The front end's end of the guide compiler: queue, cache, refusals, and a process that may end at any moment.

The process is a fake, handed in; the real one is tested in tests/engine/test_guide_process.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideKind,
    GuideOutcome,
    GuideSource,
)
from service import guide_compiler
from service.errors import (
    GuideLimitError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedOptionError,
)
from service.guide_compiler import JOBS_AT_ONCE_MAX, JOBS_MAX, REFUSED_FOR_S, RESTART_AFTER_S, GuideCompiler

SECRET = "canary[a-z]+"


class FakeChild:
    """Does what it is told by a test."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self.on_message, self.on_lost = on_message, on_lost
        self.sent: list[Any] = []
        self.killed = asyncio.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed.set()

    @property
    def jobs(self) -> list[CompileGuide]:
        return [message for message in self.sent if isinstance(message, CompileGuide)]

    def be_ready(self) -> None:
        self.on_message(GuideCompilerReady(1, 0.1))

    def answer(self, job: CompileGuide, outcome: GuideOutcome = GuideOutcome.COMPILED, **fields: Any) -> None:
        self.on_message(GuideCompiled(job.job_id, outcome, **fields))


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.children: list[FakeChild] = []
        self.error: OSError | None = None
        self.compiler = GuideCompiler(
            self.start,
            timeout_s=2.0,
            clock=lambda: self.now_s,
            salt=b"salt",
            make_refusal=lambda: QueueFullError(1.0),
        )
        self.compiler.configure(model="m", revision=None, vocab_size=9, eos_token_ids=(2,))
        self.tasks: list[asyncio.Task[bytes]] = []

    def start(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> FakeChild:
        if self.error is not None:
            raise self.error
        self.children.append(FakeChild(on_message, on_lost))
        return self.children[-1]

    @property
    def child(self) -> FakeChild:
        return self.children[-1]

    async def ask(self, source: GuideSource) -> asyncio.Task[bytes]:
        """A caller that has got as far as it can."""
        task = asyncio.create_task(self.compiler.compile(source))
        self.tasks.append(task)
        for _ in range(5):
            await asyncio.sleep(0)
        return task


def regex(text: str) -> GuideSource:
    return GuideSource(GuideKind.REGEX, text)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    for task in rig.tasks:
        task.cancel()
    await asyncio.gather(*rig.tasks, return_exceptions=True)


async def test_no_process_before_the_first_guide(rig: Rig) -> None:
    """A server without guides starts none; the first guide does, and tells it the model."""
    assert rig.children == []
    await rig.ask(regex("a"))
    assert isinstance(rig.child.sent[0], GuideCompilerConfig)
    assert rig.child.sent[0].eos_token_ids == (2,)
    assert rig.child.jobs == [], "nothing is sent before it is ready"
    rig.child.be_ready()
    assert [job.source for job in rig.child.jobs] == [regex("a")]


async def test_callers_of_one_guide_share_a_compilation_and_later_ones_its_result(rig: Rig) -> None:
    """Two at once and one afterwards: one job."""
    first, second = await rig.ask(regex("a")), await rig.ask(regex("a"))
    rig.child.be_ready()
    (job,) = rig.child.jobs
    rig.child.answer(job, guide=b"G")
    assert await first == await second == b"G"
    assert await rig.compiler.compile(regex("a")) == b"G"
    assert len(rig.child.jobs) == 1
    await rig.ask(GuideSource(GuideKind.GRAMMAR, "a"))  # the same text, meaning something else
    assert len(rig.child.jobs) == 2


async def test_the_cache_is_bounded_by_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide used longest ago gives way."""
    monkeypatch.setattr(guide_compiler, "CACHE_BYTES_MAX", 10)
    for text in ("a", "b", "a", "c"):
        task = await rig.ask(regex(text))
        if not task.done():
            rig.child.be_ready()
            rig.child.answer(rig.child.jobs[-1], guide=b"12345")
            await task
    assert (await rig.ask(regex("a"))).done()
    assert not (await rig.ask(regex("b"))).done()


@pytest.mark.parametrize(
    ("outcome", "error_class"),
    [
        (GuideOutcome.MALFORMED, InvalidRequestError),
        (GuideOutcome.UNSUPPORTED, UnsupportedOptionError),
        (GuideOutcome.TIME, GuideLimitError),
        (GuideOutcome.MEMORY, GuideLimitError),
        (GuideOutcome.SIZE, GuideLimitError),
    ],
)
async def test_a_refusal_names_the_field_and_quotes_nothing(
    rig: Rig, outcome: GuideOutcome, error_class: type[Exception]
) -> None:
    """Each outcome is an error of its own; none holds the guide's text."""
    task = await rig.ask(regex(SECRET))
    rig.child.be_ready()
    rig.child.answer(rig.child.jobs[0], outcome, what="a keyword")
    with pytest.raises(error_class) as caught:
        await task
    assert "canary" not in repr((caught.value, vars(caught.value)))
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.violations[0].field == "guided.regex"
    if isinstance(caught.value, GuideLimitError):
        assert caught.value.what == outcome.name.lower()


async def test_a_refused_guide_costs_nothing_for_a_while(rig: Rig) -> None:
    """The same guide again is refused without a job, by a fresh error; once that is long ago it is tried anew."""
    task = await rig.ask(regex("a"))
    rig.child.be_ready()
    rig.child.answer(rig.child.jobs[0], GuideOutcome.TIME)
    with pytest.raises(GuideLimitError) as first:
        await task
    with pytest.raises(GuideLimitError) as second:
        await rig.compiler.compile(regex("a"))
    assert first.value is not second.value
    assert len(rig.child.jobs) == 1
    rig.now_s += REFUSED_FOR_S
    await rig.ask(regex("a"))
    assert len(rig.child.jobs) == 2


async def test_only_some_are_compiled_at_once_and_only_so_many_wait(rig: Rig) -> None:
    """The rest wait their turn in order of arrival; one too many is told QUEUE_FULL."""
    for number in range(JOBS_MAX):
        await rig.ask(regex(f"a{number}"))
    rig.child.be_ready()
    assert [job.source.text for job in rig.child.jobs] == [f"a{number}" for number in range(JOBS_AT_ONCE_MAX)]
    with pytest.raises(QueueFullError):
        await rig.compiler.compile(regex("one too many"))
    rig.child.answer(rig.child.jobs[0], GuideOutcome.TIME)
    assert rig.child.jobs[-1].source.text == f"a{JOBS_AT_ONCE_MAX}"
    assert rig.compiler.num_jobs == JOBS_MAX - 1


async def test_who_leaves_before_the_turn_takes_the_job_along(rig: Rig) -> None:
    """A guide that nobody waits for any more is not compiled, unless it is being compiled already."""
    running = await rig.ask(regex("running"))
    rig.child.be_ready()
    for number in range(JOBS_AT_ONCE_MAX):
        await rig.ask(regex(f"a{number}"))
    waiting = await rig.ask(regex("waiting"))
    for task in (running, waiting):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert rig.compiler.num_jobs == 1 + JOBS_AT_ONCE_MAX
    rig.child.answer(rig.child.jobs[0], guide=b"G")
    assert "waiting" not in [job.source.text for job in rig.child.jobs]
    assert await rig.compiler.compile(regex("running")) == b"G"


async def test_a_lost_process_is_replaced_and_its_jobs_go_on_once(rig: Rig) -> None:
    """What it had goes to the next one; what is lost with that one, too, is taken for the cause and refused."""
    task = await rig.ask(regex("a"))
    for child_number in (0, 1):
        rig.child.be_ready()
        assert [job.source.text for job in rig.child.jobs] == ["a"]
        rig.child.on_lost()
        assert len(rig.children) == 2, f"after the loss of child {child_number}"
    with pytest.raises(GuideLimitError):
        await task
    other = await rig.ask(regex("b"))
    assert len(rig.children) == 3
    rig.child.be_ready()
    rig.child.answer(rig.child.jobs[0], guide=b"G")
    assert await other == b"G"


async def test_an_idle_process_that_is_lost_is_missed_by_nobody(rig: Rig) -> None:
    """The next guide starts another."""
    task = await rig.ask(regex("a"))
    rig.child.be_ready()
    rig.child.answer(rig.child.jobs[0], guide=b"G")
    await task
    rig.child.on_lost()
    assert len(rig.children) == 1
    await rig.ask(regex("b"))
    assert len(rig.children) == 2


async def test_a_process_that_hangs_is_killed_and_the_guide_is_not_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an answer nor an end within the time that the process itself would give a job."""
    monkeypatch.setattr(rig.compiler, "_elapsed_timeout_s", -guide_compiler.LATE_S)
    task = await rig.ask(regex("a"))
    rig.child.be_ready()
    hung = rig.child
    async with asyncio.timeout(30):
        await hung.killed.wait()
    hung.on_lost()
    with pytest.raises(GuideLimitError):
        await task
    assert [job for child in rig.children for job in child.jobs] == hung.jobs[:1]


async def test_a_process_that_is_never_ready_is_killed_and_nobody_waits_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither gets ready nor ends: callers are told an incident; a later one that is ready in time lives on."""
    monkeypatch.setattr(guide_compiler, "START_S_MAX", 0.0)
    task = await rig.ask(regex("a"))
    async with asyncio.timeout(30):
        await rig.child.killed.wait()
    rig.child.on_lost()
    with pytest.raises(InternalError):
        await task
    monkeypatch.undo()
    rig.now_s += RESTART_AFTER_S
    await rig.ask(regex("b"))
    rig.child.be_ready()
    assert rig.compiler._start_timer is None


async def test_a_process_that_cannot_start_is_an_incident_and_not_tried_at_once(rig: Rig) -> None:
    """Its own words go to the log; callers get an id, at once, and a new attempt comes with time."""
    task = await rig.ask(regex("a"))
    rig.child.on_message(GuideCompilerFailed("ImportError", "no such library"))
    rig.child.on_lost()
    with pytest.raises(InternalError):
        await task
    with pytest.raises(InternalError):
        await rig.compiler.compile(regex("b"))
    assert len(rig.children) == 1
    rig.now_s += RESTART_AFTER_S
    await rig.ask(regex("b"))
    assert len(rig.children) == 2


async def test_no_descriptors_for_a_process(rig: Rig) -> None:
    """An OSError from the start is the caller's incident, not the server's end."""
    rig.error = OSError(24, "Too many open files")
    with pytest.raises(InternalError):
        await rig.compiler.compile(regex("a"))
    rig.error = None
    rig.now_s += RESTART_AFTER_S
    await rig.ask(regex("a"))
    assert len(rig.children) == 1


async def test_closing_ends_the_process_and_lets_nobody_hang(rig: Rig) -> None:
    """Whoever waits is told."""
    task = await rig.ask(regex("a"))
    rig.child.be_ready()
    rig.compiler.close()
    assert rig.child.killed.is_set()
    rig.child.on_lost()
    with pytest.raises(InternalError):
        await task


async def test_a_tokenizer_that_guides_cannot_follow_is_an_option_not_supported(rig: Rig) -> None:
    """For good: no later guide starts a process to find out again."""
    task = await rig.ask(regex("a"))
    rig.child.on_message(GuideCompilerFailed("UnsupportedVocabularyError", "", is_unsupported=True))
    rig.child.on_lost()
    with pytest.raises(UnsupportedOptionError):
        await task
    rig.now_s += RESTART_AFTER_S
    with pytest.raises(UnsupportedOptionError):
        await rig.compiler.compile(regex("b"))
    assert len(rig.children) == 1
