"""Requests with guides in the engine's loop: they wait for their guide, and nobody waits for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.core.output import SequenceFailure, StepPlan, StepResult
from scheduler.messages import Abort, FailureKind, Pause, RequestFailure, Submit, Unpause
from tests.engine.test_engine_core import World
from tests.fakes import make_submit


class Shelf:
    """Says which guides have been read; counts what it is asked."""

    def __init__(self, world: World) -> None:
        self.ready: set[bytes] = set()
        self.asked: list[tuple[bytes, tuple[int, ...]]] = []
        world.runner.is_guide_ready = self.is_guide_ready  # type: ignore[attr-defined]

    def is_guide_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        self.asked.append((guide, eos_token_ids))
        return guide in self.ready


def guided(request_id: int, guide: bytes = b"guide", **fields: Any) -> Submit:
    return replace(make_submit(request_id, range(3), max_tokens=2, **fields), guide=guide)


def test_a_request_waits_for_its_guide_and_the_others_do_not() -> None:
    """Steps go on beside it; when the guide is there it is let in, though nothing new has arrived."""
    world = World()
    shelf = Shelf(world)
    world.inbox += [guided(1), make_submit(2, range(3), max_tokens=2)]
    finished = [output.request_id for _ in range(3) if (said := world.core.step()) for output in said.outputs]
    assert set(finished) == {2}
    assert world.core.has_work, "or the loop would sleep until the next message"
    assert world.core.is_held_up, "or it would spin"
    shelf.ready.add(b"guide")
    said = world.run()
    assert [output.request_id for step in said for output in step.outputs] == [1, 1]
    assert not world.core.has_work
    assert not world.core.is_held_up


def test_an_engine_with_something_to_do_is_not_held_up() -> None:
    """It must not sleep between its steps."""
    world = World()
    Shelf(world)
    world.inbox += [guided(1), make_submit(2, range(3), max_tokens=9)]
    world.core.step()
    assert not world.core.is_held_up


def test_one_that_is_aborted_meanwhile_is_forgotten() -> None:
    """Its guide may come as it likes."""
    world = World()
    shelf = Shelf(world)
    world.inbox.append(guided(1))
    world.core.step()
    world.inbox.append(Abort((1,)))
    world.core.step()
    shelf.ready.add(b"guide")
    assert world.run() == []
    assert not world.core.has_work


def test_a_pause_waits_for_the_guide_with_its_request() -> None:
    """A stream that was full when its engine died is sent again with its pause: it gets no step until Unpause, though
    its guide is read only after both have come; and until then the loop need not spin."""
    world = World()
    shelf = Shelf(world)
    world.inbox += [guided(1), Pause((1,))]
    world.core.step()
    assert world.core.is_held_up
    shelf.ready.add(b"guide")
    assert [step.outputs for step in world.run() if step.outputs] == []
    assert not world.core.has_work
    world.inbox.append(Unpause((1,)))
    assert len([output for step in world.run() for output in step.outputs]) == 2


def test_an_unpause_meets_the_pause_of_a_request_whose_guide_is_being_read() -> None:
    """The last word on a request counts."""
    world = World()
    shelf = Shelf(world)
    world.inbox += [guided(1), Pause((1,))]
    world.core.step()
    world.inbox.append(Unpause((1,)))
    world.core.step()
    shelf.ready.add(b"guide")
    assert len([output for step in world.run() for output in step.outputs]) == 2


def test_without_a_guide_nobody_asks() -> None:
    """What has none pays nothing."""
    world = World()
    shelf = Shelf(world)
    world.inbox.append(make_submit(1, range(3), max_tokens=2))
    world.run()
    assert shelf.asked == []


def test_a_sequence_that_cannot_go_on_ends_its_request_alone() -> None:
    """The failure is told with its kind and incident; the neighbour goes on, and the blocks come back."""
    world = World()
    Shelf(world).ready.add(b"guide")
    execute = world.runner.execute

    def failing(plan: StepPlan) -> StepResult:
        result = execute(plan)
        failed = {s: SequenceFailure(FailureKind.GUIDE_DEAD_END, "x") for s in plan.sampled_seq_ids[:1]}
        return replace(result, failures=failed if plan.step_id == 1 else {})

    world.runner.execute = failing  # type: ignore[method-assign]
    world.inbox += [guided(1), make_submit(2, range(3), max_tokens=2)]
    said = world.run()
    assert [f for step in said for f in step.failures] == [RequestFailure(1, FailureKind.GUIDE_DEAD_END, "x")]
    assert [output.request_id for step in said for output in step.outputs] == [2, 2]
    assert world.scheduler.stats().num_used_kv_blocks == 0
