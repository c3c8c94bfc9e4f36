from __future__ import annotations

import pytest

from tests.sim.simulator import Report, Simulation

SEEDS = range(20)


def run(seed: int, *, load: float = 1.0, fault_rate: float = 0.0) -> Report:
    return Simulation(seed, load=load, fault_rate=fault_rate).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_everyone_gets_an_answer(seed: int) -> None:
    """Under a load that preempts, every request ends once and with the tokens it would have got alone."""
    report = run(seed)
    assert report.num_refused == 0
    assert report.num_steps > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault_rate", [0.02, 0.1])
def test_everyone_gets_an_answer_though_steps_fail(seed: int, fault_rate: float) -> None:
    """Whatever share of the steps fails, is confined or made small, every request ends as it would have alone."""
    assert run(seed, fault_rate=fault_rate).num_failed_steps > 0


def test_same_seed_same_trace() -> None:
    """The same seed twice gives the same plans, outputs and times; another seed gives others."""
    assert run(1) == run(1)
    assert run(1, fault_rate=0.1) == run(1, fault_rate=0.1)
    assert run(1).trace_sha256 != run(2).trace_sha256


def test_the_world_is_eventful() -> None:
    """The seeds in use do bring preemptions, prefix hits, aborts, failures, pauses and time-outs of the queue."""
    reports = [run(seed) for seed in SEEDS]
    assert sum(report.num_preemptions > 0 for report in reports) > len(reports) / 2
    for name in ("num_cached_tokens", "num_aborted", "num_failed", "num_expired", "num_pauses"):
        assert sum(getattr(report, name) > 0 for report in reports) > len(reports) / 2, name


def test_recomputation_is_bounded() -> None:
    """Even at three times the load, preemption costs less than a quarter of the computed tokens."""
    reports = [run(seed, load=3.0) for seed in SEEDS]
    num_tokens_computed = sum(report.num_tokens_computed for report in reports)
    num_tokens_useful = sum(report.num_tokens_useful for report in reports)
    assert num_tokens_useful > 0.75 * num_tokens_computed


def test_higher_priority_is_served_sooner() -> None:
    """In an overloaded world the mean time to the first token falls with the priority, in every single one."""
    for seed in SEEDS:
        waits_s = run(seed, load=3.0).first_token_s_by_priority
        assert waits_s[-10] > waits_s[0] > waits_s[10]
