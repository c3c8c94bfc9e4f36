"""scheduler/engine/containment.py, in an engine core on fakes: what a failed step costs, and whom.

The fake runner computes a request's tokens from its own tokens alone and spoils all KV that a failed step could, so
"exact" is checked for whoever survives.
"""

from __future__ import annotations

import errno
import functools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from scheduler.codec import Message
from scheduler.core.config import SchedulerConfig
from scheduler.core.output import StepPlan
from scheduler.core.scheduler import Scheduler
from scheduler.engine.containment import (
    NUM_GOOD_STEPS_TO_DOUBLE,
    NUM_STEPS_TO_FORGET,
    SMALLEST_CHUNK_TOKENS,
    Cause,
    cause_of,
)
from scheduler.engine.engine_core import EngineCore
from scheduler.flight_record import StepShape
from scheduler.messages import Abort, FailureKind, Pause, Phase, SequenceStart, StepOutputs, Submit, Unpause
from tests.core.failing_runner import FailingRunner
from tests.fakes import FakeClock, make_submit, reference_output

VOCAB_SIZE = 1000
POISON_IDS = (1001, 1002)
"""Never sampled, so only prompts hold them."""


class AcceleratorError(RuntimeError):
    """As torch names what a CUDA context does not survive."""


class OutOfMemoryError(RuntimeError):
    """As torch names its allocator's failure on a device."""


class NoRecorder:
    def enter(self, phase: Phase, step_id: int) -> None: ...

    def record(self, shape: StepShape, request_ids: Sequence[int]) -> None: ...


class World:
    """An engine core whose runner fails as a test says; keeps what each request was told."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_kv_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
    ) -> None:
        self.max_model_len = min(max_model_len, num_kv_blocks * block_size)
        self.runner = FailingRunner(num_kv_blocks=num_kv_blocks, block_size=block_size, vocab_size=VOCAB_SIZE)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_kv_blocks)
        )
        self.inbox: list[Message] = []
        self.core = EngineCore(self.scheduler, self.runner, self._receive, NoRecorder(), FakeClock())
        self.submits: dict[int, Submit] = {}
        self.sequences: dict[tuple[int, int], list[int]] = {}
        """(request, index) → tokens."""
        self.tokens: dict[int, list[int]] = {}
        """Request → those of its first sequence."""
        self.failures: dict[int, FailureKind] = {}
        self.aborted: set[int] = set()
        self.plans: list[StepPlan] = []
        self.num_failed_steps = 0
        self.records: list[EventDict] = []

    def fail_when(self, is_failing: Callable[[StepPlan], bool], make_error: Callable[[], BaseException]) -> None:
        """From now on, steps for which the predicate holds raise."""

        def fault(plan: StepPlan) -> None:
            self.plans.append(plan)
            if is_failing(plan):
                self.num_failed_steps += 1
                raise make_error()

        self.runner.fault = fault

    def token_ids_in(self, plan: StepPlan) -> dict[int, tuple[int, ...]]:
        """seq_id → the tokens known of each sequence in this step."""
        known = {seq_id: self.runner.token_ids(seq_id) for seq_id in plan.seq_ids}
        return known | {new.seq_id: tuple(new.token_ids) for new in plan.new}

    def submit(self, submits: Iterable[Submit]) -> None:
        for submit in submits:
            self.submits[submit.request_id] = submit
            for start in submit.sequences:
                self.sequences[submit.request_id, start.index] = []
            self.tokens[submit.request_id] = self.sequences[submit.request_id, submit.sequences[0].index]
            self.inbox.append(submit)

    def abort(self, request_id: int) -> None:
        self.aborted.add(request_id)
        self.inbox.append(Abort((request_id,)))

    def step(self) -> None:
        with capture_logs() as records:
            said = self.core.step()
        self.records += records
        if said is not None:
            self._take(said)

    def run(self, num_steps_max: int = 5000) -> int:
        for num_steps in range(num_steps_max):
            if not self.core.has_work and not self.inbox:
                return num_steps
            self.step()
        raise AssertionError(f"the engine never came to rest in {num_steps_max} steps")

    def check(self, failed: Collection[int] = ()) -> None:
        """Everybody but the aborted ended exactly as alone, and `failed` badly; nothing is held, nobody is known."""
        assert set(self.failures) == set(failed)
        for (request_id, index), token_ids in self.sequences.items():
            expected, _ = reference_output(
                self.submits[request_id], index, vocab_size=VOCAB_SIZE, max_model_len=self.max_model_len
            )
            got = tuple(token_ids)
            if request_id in self.failures or request_id in self.aborted:
                assert got == expected[: len(got)]
            else:
                assert got == expected
        assert self.scheduler.stats().num_used_kv_blocks == 0
        assert not self.scheduler.has_work

    def _receive(self) -> list[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def _take(self, said: StepOutputs) -> None:
        for output in said.outputs:
            assert output.request_id not in self.failures
            self.sequences[output.request_id, output.index] += output.new_token_ids
        for failure in said.failures:
            assert failure.request_id not in self.failures, "failed twice"
            self.failures[failure.request_id] = failure.kind


def innocents(request_ids: Iterable[int], *, max_tokens: int = 12) -> list[Submit]:
    return [make_submit(i, range(10 * i, 10 * i + 5 + i % 7), max_tokens=max_tokens) for i in request_ids]


def holds(world: World, plan: StepPlan, poison_ids: Iterable[int]) -> bool:
    present = {token_id for token_ids in world.token_ids_in(plan).values() for token_id in token_ids}
    return present.issuperset(poison_ids)


# ----------------------------------------------------------------------------------------------------- one culprit


@pytest.mark.parametrize("num_innocents", [0, 1, 2, 6, 7])
@pytest.mark.parametrize("position", [0, 3, 100])
def test_a_poison_prompt_fails_alone(num_innocents: int, position: int) -> None:
    """A request whose prompt makes its steps raise fails with STEP_FAILED; every other one gets exactly its tokens."""
    world = World()
    submits = innocents(range(1, num_innocents + 1))
    submits.insert(position, make_submit(99, [1, 2, POISON_IDS[0], 3]))
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    world.submit(submits)
    world.run()
    world.check(failed={99})
    assert world.failures[99] is FailureKind.STEP_FAILED
    assert world.runner.num_probes == world.num_failed_steps


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_a_request_that_raises_at_its_kth_token_keeps_the_ones_before(num_tokens: int) -> None:
    """What the culprit had before its step failed stays told; the others, in mid-stream too, lose nothing."""
    world = World()
    victim = make_submit(5, range(7), max_tokens=20)

    def is_failing(plan: StepPlan) -> bool:
        return any(
            ids[:7] == tuple(range(7)) and len(ids) >= 7 + num_tokens for ids in world.token_ids_in(plan).values()
        )

    world.fail_when(is_failing, lambda: ValueError("bad"))
    world.submit([*innocents(range(1, 5)), victim, *innocents(range(6, 9))])
    world.run()
    world.check(failed={5})
    assert len(world.tokens[5]) == num_tokens


@pytest.mark.parametrize("max_num_seqs", [8, 3])
def test_one_bad_sequence_is_the_end_of_its_request_alone(max_num_seqs: int) -> None:
    """Of four sequences the third makes its steps raise at its second token: its request fails once, siblings and all,
    and everybody else, another request of several sequences included, gets exactly its tokens."""
    world = World(max_num_seqs=max_num_seqs)
    starts = tuple(SequenceStart(index) for index in range(4))
    bad = replace(make_submit(5, range(7), max_tokens=20), sequences=starts)
    (begin, *_), _ = reference_output(bad, 2, vocab_size=VOCAB_SIZE, max_model_len=world.max_model_len)

    def is_failing(plan: StepPlan) -> bool:
        return any(ids[:8] == (*range(7), begin) for ids in world.token_ids_in(plan).values())

    world.fail_when(is_failing, lambda: ValueError("bad"))
    good = replace(make_submit(6, range(60, 69), max_tokens=9), sequences=starts[1:])
    world.submit([*innocents(range(1, 4)), bad, good, *innocents(range(7, 9))])
    world.run()
    world.check(failed={5})
    assert world.failures[5] is FailureKind.STEP_FAILED


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_paused_request_holds_up_no_isolation(when: str) -> None:
    """A suspect whose reader falls behind while requests are isolated goes on until that is over, and is paused then;
    one that was paused before is none of it. Either goes on when it is told to."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    world.submit(innocents(range(1, 5), max_tokens=30))
    for _ in range(3):
        world.step()
    if when == "before":
        world.inbox.append(Pause((2,)))
        world.step()
    world.submit([make_submit(99, [POISON_IDS[0]])])
    world.step()
    if when == "during":
        world.inbox.append(Pause((2,)))
    world.run(200)
    assert world.failures == {99: FailureKind.STEP_FAILED}
    assert 3 <= len(world.tokens[2]) < 30
    assert all(len(world.tokens[request_id]) == 30 for request_id in (1, 3, 4))
    world.inbox.append(Unpause((2,)))
    world.run()
    world.check(failed={99})


def test_requests_outside_the_failed_step_wait_and_lose_nothing() -> None:
    """While halves are tried, those who wait and those who arrive are held; afterwards all get their tokens."""
    world = World(max_num_seqs=4)
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    world.submit([*innocents(range(1, 4)), make_submit(4, [POISON_IDS[0]]), *innocents(range(5, 9))])
    world.step()
    in_step = {1, 2, 3, 4}
    world.submit(innocents(range(9, 12)))
    while not world.failures:
        world.step()
        assert set(world.scheduler.step_request_ids) <= in_step
    world.run()
    world.check(failed={4})


def test_a_fault_that_passes_is_nobodys() -> None:
    """A step that fails once costs no request, be it one or many that were in it."""
    for num_requests in (1, 5):
        world = World()
        faults = iter([False, False, True])
        world.fail_when(functools.partial(lambda faults, _: next(faults, False), faults), lambda: ValueError("once"))
        world.submit(innocents(range(1, num_requests + 1)))
        world.run()
        world.check()
        assert world.num_failed_steps == 1


def test_a_fault_at_another_place_is_not_the_second_one() -> None:
    """One that got past its place and fails further on, alone in an isolation, is tried there once more."""
    world = World(max_num_batched_tokens=256)
    world.fail_when(lambda _: len(world.plans) in {5, 12, 14}, lambda: ValueError("passes"))
    world.submit(innocents([1, 2], max_tokens=30))
    while len(world.plans) < 14:
        world.step()
    assert [len(plan.seq_ids) for plan in world.plans[11:14]] == [2, 1, 1]
    world.run()
    world.check()


def test_several_culprits_are_all_found() -> None:
    """Each of several poisons in one batch is found; the innocents between them live."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    culprits = {2, 3, 7}
    world.submit(
        make_submit(s.request_id, [*s.prompt_token_ids, POISON_IDS[0]]) if s.request_id in culprits else s
        for s in innocents(range(1, 9))
    )
    world.run()
    world.check(failed=culprits)


def test_two_that_fail_only_together_both_get_their_tokens() -> None:
    """A step that raises over a combination fails nobody: apart its members go on, a token a round at least."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS), lambda: ValueError("together"))
    world.submit(
        [
            *innocents([1, 2, 3]),
            *(make_submit(10 + i, [i, POISON_IDS[i]], max_tokens=6) for i in range(2)),
            *innocents([4]),
        ]
    )
    world.run()
    world.check()


@pytest.mark.parametrize("max_tokens", [40, 100])
def test_what_fails_only_together_is_kept_apart_for_longer_each_time(max_tokens: int) -> None:
    """Isolations that find nobody and soon begin again get longer: their number is far below that of the tokens."""
    world = World()
    world.fail_when(lambda plan: len(plan.seq_ids) > 2, lambda: ValueError("together"))
    world.submit(innocents(range(1, 5), max_tokens=max_tokens))
    world.run()
    world.check()
    num_isolations = sum("where" in record for record in world.records)
    assert 4 <= num_isolations <= 5 + max_tokens / 32


def steps_apart(world: World) -> list[Sequence[int]]:
    """The steps of an isolation of requests 1 and 2: from the next failure on until they are together again."""
    num_failed_steps = world.num_failed_steps
    while world.num_failed_steps == num_failed_steps:
        world.step()
    in_steps: list[Sequence[int]] = []
    while True:
        world.step()
        if len(world.scheduler.step_request_ids) == 2:
            return in_steps
        in_steps.append(world.scheduler.step_request_ids)


def test_an_isolation_is_longer_only_soon_after_another() -> None:
    """A fault that passes keeps its requests apart for one token; soon after another, for two; later, for one again."""
    world = World(max_num_batched_tokens=256)
    first, soon = 5, 12
    late = soon + 4 + NUM_STEPS_TO_FORGET + 2
    world.fail_when(lambda _: len(world.plans) in {first, soon, late}, lambda: ValueError("passes"))
    world.submit(innocents([1, 2], max_tokens=110))
    assert steps_apart(world) == [(1,), (2,)]
    assert steps_apart(world) == [(1,), (1,), (2,), (2,)]
    assert steps_apart(world) == [(1,), (2,)]
    world.run()
    world.check()


def test_an_isolation_that_found_its_culprit_makes_none_longer() -> None:
    """A fault that passes right after a culprit was found keeps its requests apart for one token."""
    world = World()
    fault_at: set[int] = set()
    world.fail_when(
        lambda plan: len(world.plans) in fault_at or holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad")
    )
    world.submit([*innocents([1, 2], max_tokens=100), make_submit(3, [POISON_IDS[0]])])
    while not world.failures:
        world.step()
    fault_at.add(len(world.plans) + 3)
    assert steps_apart(world) == [(1,), (2,)]
    world.run()
    world.check(failed={3})


def test_a_culprit_is_found_in_a_logarithm_of_steps() -> None:
    """Among 32 the culprit stands alone after at most 1 + log2(32) failed steps."""
    world = World(max_num_seqs=32, max_num_batched_tokens=512, num_kv_blocks=512)
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    world.submit([*innocents(range(1, 22)), make_submit(99, [POISON_IDS[0]]), *innocents(range(23, 33))])
    world.run()
    world.check(failed={99})
    assert world.num_failed_steps <= 1 + 5


def test_those_of_a_group_who_were_not_in_its_failed_step_are_tried_next() -> None:
    """When one of a group fails before the others had their turn, they come next, apart from the second half."""
    world = World(max_num_batched_tokens=8)

    def is_failing(plan: StepPlan) -> bool:
        return len(plan.seq_ids) == 4 or (world.num_failed_steps > 0 and holds(world, plan, POISON_IDS[:1]))

    world.fail_when(is_failing, lambda: ValueError("bad"))
    world.submit(make_submit(i, [*range(10 * i, 10 * i + 7), POISON_IDS[0] if i == 1 else 7]) for i in range(1, 5))
    while not world.failures:
        world.step()
    for group in ({2}, {3, 4}):
        num_tokens = {request_id: len(world.tokens[request_id]) for request_id in group}
        while any(len(world.tokens[request_id]) == num_tokens[request_id] for request_id in group):
            world.step()
            assert group.issuperset(world.scheduler.step_request_ids)
    world.run()
    world.check(failed={1})


def test_one_that_got_past_and_fails_again_is_a_suspect_again() -> None:
    """While its neighbour still computes its prompt, a request that went on raises: it is tried alone, and fails."""
    world = World(max_num_batched_tokens=8)

    def is_failing(plan: StepPlan) -> bool:
        if len(plan.seq_ids) == 3 and world.num_failed_steps == 0:
            return True
        return any(ids[:2] == (10, 11) and len(ids) >= 9 for ids in world.token_ids_in(plan).values())

    world.fail_when(is_failing, lambda: ValueError("bad"))
    world.submit([make_submit(1, [10, 11], max_tokens=30), make_submit(2, range(200, 240)), make_submit(3, [3])])
    while not world.num_failed_steps:
        world.step()
    world.run()
    world.check(failed={1})
    assert world.num_failed_steps == 3


def test_the_runner_is_reset_between_groups_only() -> None:
    """While a member that is not past computes, nothing is begun anew, even if another is past."""
    world = World(max_num_batched_tokens=8)
    world.fail_when(lambda plan: len(plan.seq_ids) == 4 and not world.num_failed_steps, lambda: ValueError("once"))
    world.submit(make_submit(i, range(10 * i, 10 * i + 5), max_tokens=9) for i in range(1, 5))
    world.run()
    world.check()
    assert [list(plan.num_scheduled_tokens) for plan in world.plans[3:7]] == [[7, 1], [1, 5], [6, 2], [1, 3]]
    assert world.num_failed_steps == 1
    assert world.runner.num_resets == 2


def test_a_member_that_waits_for_one_that_is_past_gets_the_engine_to_itself() -> None:
    """The KV pool no longer holds both: the one that is past makes way, instead of running to its end first."""
    world = World(num_kv_blocks=17, max_model_len=64)
    world.fail_when(lambda _: len(world.plans) == 22, lambda: ValueError("once"))
    world.submit(make_submit(i, range(20 * i, 20 * i + 8), max_tokens=40) for i in (1, 2))
    for _ in range(19):
        world.step()
    world.submit([make_submit(3, [3], max_tokens=30)])
    while not world.num_failed_steps:
        world.step()
    assert set(world.scheduler.step_request_ids) == {1, 2, 3}
    in_steps = []
    while world.core.has_work:
        world.step()
        in_steps.append(world.scheduler.step_request_ids)
    assert in_steps[:3] == [(1,), (2,), (3,)]
    world.check()


def test_aborts_during_an_isolation() -> None:
    """Suspects that are aborted, even all of a group, do not stop the world."""
    for num_steps in range(1, 6):
        world = World()
        world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))  # noqa: B023
        world.submit([*innocents(range(1, 4)), make_submit(4, [POISON_IDS[0]]), *innocents(range(5, 9))])
        for _ in range(num_steps):
            world.step()
        for request_id in (1, 2, 3, 5):
            world.abort(request_id)
        world.run()
        world.check(failed={4})


def test_everybody_aborted_during_an_isolation_leaves_an_idle_engine() -> None:
    """If all suspects are aborted, the isolation is over with the next step, and the next request is served."""
    world = World()
    world.fail_when(lambda _: len(world.plans) == 1, lambda: ValueError("once"))
    world.submit(innocents([1, 2]))
    world.step()
    world.abort(1)
    world.abort(2)
    world.run(num_steps_max=2)
    world.submit(innocents([3]))
    world.run()
    world.check()


def test_one_that_runs_alone_by_order_is_judged_like_any_other() -> None:
    """A request with `alone_until` that makes its steps raise fails; the batch beside it goes on."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("bad"))
    alone = replace(make_submit(5, [3, POISON_IDS[0]]), alone_until=3)
    world.submit([*innocents(range(1, 4)), alone, replace(make_submit(6, [4]), alone_until=2), *innocents([7])])
    world.run()
    world.check(failed={5})


# ------------------------------------------------------------------------------------------------------ not healthy


@pytest.mark.parametrize(
    "error", [AcceleratorError("device-side assert triggered"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_device_errors_are_the_death_of_the_engine(error: Exception) -> None:
    """A CUDA context does not survive its errors: they leave step() at once, and nothing is tried."""
    world = World()
    world.fail_when(lambda _: True, lambda: error)
    world.submit(innocents([1]))
    with pytest.raises(type(error)) as caught:
        world.step()
    assert caught.value is error
    assert (world.runner.num_probes, world.records) == (0, [])


@pytest.mark.parametrize("method", ["probe", "reset"])
def test_a_failed_probe_raises_the_steps_own_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process cannot compute even the probe, the failure of the step, not of the probe, leaves step()."""
    world = World()
    error = ValueError("the cause")

    def explode() -> None:
        raise RuntimeError("no more")

    world.fail_when(lambda _: True, lambda: error)
    monkeypatch.setattr(world.runner, method, explode)
    world.submit(innocents([1, 2]))
    with pytest.raises(ValueError, match="the cause") as caught:
        world.step()
    assert caught.value is error
    assert error.__context__ is None
    assert "fault" in [entry.name for entry in caught.traceback]
    assert world.records == []


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Cause.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            Cause.OUT_OF_MEMORY,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), Cause.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Cause.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left"), Cause.STEP),
        (AcceleratorError("out of memory"), Cause.DEVICE),
        (RuntimeError("CUDA error: out of memory"), Cause.DEVICE),
        (RuntimeError("shapes differ"), Cause.STEP),
        (ValueError("can't allocate memory"), Cause.STEP),
        (KeyError("CUDA error"), Cause.STEP),
    ],
    ids=repr,
)
def test_causes(error: Exception, cause: Cause) -> None:
    """What an exception is called and says tells its kind."""
    assert cause_of(error) is cause


# ---------------------------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("max_tokens_that_fit", [16, 20, 40])
def test_out_of_memory_above_some_tokens_costs_nobody(max_tokens_that_fit: int) -> None:
    """Steps get smaller until they fit; everybody gets exactly its tokens."""
    world = World(max_num_seqs=8, max_num_batched_tokens=64)
    world.fail_when(lambda plan: plan.num_batched_tokens > max_tokens_that_fit, MemoryError)
    world.submit(innocents(range(1, 13)))
    world.run()
    world.check()
    assert world.num_failed_steps > 0


@pytest.mark.parametrize("max_num_seqs_that_fit", [1, 2, 5])
def test_out_of_memory_above_some_sequences_costs_nobody(max_num_seqs_that_fit: int) -> None:
    """Fewer sequences share a step until they fit; everybody gets exactly its tokens."""
    world = World(max_num_seqs=8, max_num_batched_tokens=64)
    world.fail_when(
        lambda plan: len(plan.seq_ids) > max_num_seqs_that_fit, lambda: OutOfMemoryError("CUDA out of memory")
    )
    world.submit(innocents(range(1, 13)))
    world.run()
    world.check()


def test_what_does_not_fit_in_its_smallest_chunk_fails_alone() -> None:
    """A request whose every step runs out of memory fails with OUT_OF_MEMORY; the others, also in its batch, do not."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), MemoryError)
    world.submit([*innocents([1, 2]), make_submit(3, [POISON_IDS[0], *range(40)]), *innocents(range(4, 9))])
    world.run()
    world.check(failed={3})
    assert world.failures[3] is FailureKind.OUT_OF_MEMORY
    assert len(world.plans[-1].seq_ids) > 0


def test_out_of_memory_always_fails_everyone_and_ends() -> None:
    """With no memory at all requests fail one by one; nothing loops."""
    world = World()
    world.fail_when(lambda _: True, MemoryError)
    world.submit(innocents(range(1, 6)))
    num_steps = world.run()
    world.check(failed=range(1, 6))
    assert num_steps < 20


def test_bounds_double_back_after_enough_good_steps() -> None:
    """Steps are small after running out of memory, and back at their configured bounds after good ones."""
    world = World(max_num_seqs=8, max_num_batched_tokens=64)
    world.fail_when(lambda _: world.num_failed_steps == 0, MemoryError)
    world.submit([make_submit(1, range(50), max_tokens=64)])
    world.step()
    assert (world.scheduler.max_num_batched_tokens, world.scheduler.is_limited) == (25, True)
    world.step()
    assert world.plans[-1].num_batched_tokens == 25
    for _ in range(NUM_GOOD_STEPS_TO_DOUBLE - 2):
        world.step()
    assert world.scheduler.max_num_batched_tokens == 25
    world.submit([make_submit(2, range(50), max_tokens=120)])
    world.step()
    assert world.scheduler.max_num_batched_tokens == 50
    for _ in range(NUM_GOOD_STEPS_TO_DOUBLE):
        world.step()
    assert (world.scheduler.max_num_batched_tokens, world.scheduler.is_limited) == (64, False)
    world.run()
    world.check()


def test_a_step_is_never_cut_below_the_smallest_chunk() -> None:
    """The last request is given up at SMALLEST_CHUNK_TOKENS, not at one token."""
    world = World()
    world.fail_when(lambda _: True, MemoryError)
    world.submit([make_submit(1, range(64))])
    world.run()
    assert [plan.num_batched_tokens for plan in world.plans] == [64, 32, SMALLEST_CHUNK_TOKENS]


def test_memory_of_a_failed_step_is_let_go_before_the_probe() -> None:
    """What the frames that raised held is free when the probe runs, of the errors behind the error too."""
    world = World()

    class Held:
        num_alive = 0

        def __init__(self) -> None:
            Held.num_alive += 1

        def __del__(self) -> None:
            Held.num_alive -= 1

    def fault(_: StepPlan) -> None:
        held = Held()
        try:
            inner()
        except MemoryError as error:
            raise OutOfMemoryError(str(held)) from error

    def inner() -> None:
        held = Held()
        raise MemoryError(str(held))

    num_alive_at_probe = []
    world.runner.fault = fault
    world.runner.probe_fault = lambda: num_alive_at_probe.append(Held.num_alive)
    world.submit(innocents([1]))
    world.run()
    assert num_alive_at_probe == [0] * world.runner.num_probes


# -------------------------------------------------------------------------------------------------------- the log


def test_a_contained_step_is_logged_with_its_place_once_per_isolation() -> None:
    """Each contained step is one record; where it was raised is told by the first alone, the error's text never."""
    world = World()
    world.fail_when(lambda plan: holds(world, plan, POISON_IDS[:1]), lambda: ValueError("secret"))
    world.submit([*innocents(range(1, 5)), make_submit(5, [POISON_IDS[0]])])
    world.run()
    assert len(world.records) == world.num_failed_steps > 2
    first, *others = world.records
    assert all(record["event"] == "step contained" for record in world.records)
    assert all(record["log_level"] == "warning" for record in world.records)
    assert (first["num_requests"], first["num_requests_failed"], first["exception_type"]) == (
        5,
        0,
        "builtins.ValueError",
    )
    assert first["where"][-1].endswith("fault")
    assert not any("where" in record for record in others)
    assert others[-1]["num_requests_failed"] == 1
    assert "secret" not in str(world.records)
    world.submit([make_submit(6, [POISON_IDS[0]])])
    world.run()
    assert "where" in world.records[len(others) + 1]


# ------------------------------------------------------------------------------------------------- all of it at once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_of_faults_costs_only_the_culprits(seed: int) -> None:
    """Poison, faults that pass, shortage of memory, aborts, arrivals, requests alone, a pool that preempts: whoever is
    not poisoned and not aborted gets exactly its tokens, and the engine comes to rest.
    """
    rng = random.Random(seed)
    world = World(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(8, 48),
        num_kv_blocks=rng.randint(24, 64),
        block_size=2,
        max_model_len=44,
    )
    max_num_tokens_that_fit = rng.choice([SMALLEST_CHUNK_TOKENS, 24, 1000])

    def fault(plan: StepPlan) -> None:
        world.plans.append(plan)
        if holds(world, plan, POISON_IDS[:1]) or rng.random() < 0.02:
            raise ValueError
        if plan.num_batched_tokens > max(max_num_tokens_that_fit, len(plan.seq_ids)):
            raise MemoryError

    world.runner.fault = fault
    poisoned = set()
    for request_id in range(1, 40):
        prompt = [rng.choice([1, 2])] * rng.randint(0, 8) + [
            rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))
        ]
        if rng.random() < 0.1:
            prompt.append(POISON_IDS[0])
            poisoned.add(request_id)
        submit = make_submit(
            request_id,
            prompt,
            max_tokens=rng.randint(1, 16),
            priority=rng.choice([0, 0, 1]),
            cache_bypass=rng.random() < 0.2,
        )
        world.submit([replace(submit, alone_until=rng.choice([0, 0, 0, 1, 4]))])
        if rng.random() < 0.1:
            world.abort(rng.randint(1, request_id))
        for _ in range(rng.randint(0, 4)):
            world.step()
    world.run()
    assert set(world.failures) >= poisoned - world.aborted
    for request_id in set(world.failures) - poisoned:  # two faults that pass, one after the other
        assert world.failures[request_id] is FailureKind.STEP_FAILED
    world.check(failed=set(world.failures))
