"""A fake runner whose steps can fail, and that can be reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from scheduler.core.output import StepPlan, StepResult
from tests.fakes import FakeRunner

_SPOILT = -2


class StepFailedError(Exception):
    """A step failed, as a test wished."""


class FailingRunner(FakeRunner):
    """Steps for which `fault` raises fail; the rest, it computes."""

    fault: Callable[[StepPlan], None] = staticmethod(lambda _: None)
    probe_fault: Callable[[], None] = staticmethod(lambda: None)
    num_resets = 0
    num_probes = 0

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            self.fault(plan)
        except BaseException as error:  # noqa: BLE001 - some faults are meant to end the process
            self.fail(plan, error)
        return super().execute(plan)

    def fail(self, plan: StepPlan, error: BaseException | None = None) -> NoReturn:
        """Raise after having gone as far as can be: plan applied, all KV of the step's sequences overwritten."""
        assert plan.step_id == self._last_step_id + 1, "each plan is executed once, in order"
        self._last_step_id = plan.step_id
        self._apply_changes(plan)
        self._check_shape(plan)
        self._check_contents()
        for seq_id in plan.seq_ids:
            for block_id in self._sequences[seq_id].block_table or ():
                slot = block_id * self.block_size
                self._slots[slot : slot + self.block_size] = [_SPOILT] * self.block_size
        raise error or StepFailedError

    def reset(self) -> None:
        """Forget every sequence; the slots keep what is in them."""
        self.num_resets += 1
        self._sequences.clear()

    def probe(self) -> None:
        self.num_probes += 1
        self.probe_fault()

    def token_ids(self, seq_id: int) -> tuple[int, ...]:
        """What this runner knows of a sequence; empty if nothing."""
        sequence = self._sequences.get(seq_id)
        return () if sequence is None else tuple(sequence.token_ids)
