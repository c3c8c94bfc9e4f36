"""What goes in a step and what comes of it, one claim at a time.

Who gives way to whom is in test_scheduler_precedence.py, the interplay in test_scheduler_machine.py and tests/sim.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.core.request import Sequence
from scheduler.core.scheduler import Scheduler
from scheduler.messages import EngineStats, FailureKind, FinishReason, SequenceOutput, SequenceStart
from tests.core.driver import Driver, make_config, scheduled
from tests.fakes import FakeRunner, make_submit, reference_output

# ------------------------------------------------------------------------------------------------- what goes in a step


def test_nothing_to_do() -> None:
    """Without requests there is no plan and no work."""
    scheduler = Scheduler(make_config())
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_one_request_from_prompt_to_end() -> None:
    """A request's prompt is computed in one step, then one token a step; it ends with max_tokens tokens."""
    driver = Driver(make_config())
    answer = driver.submit(make_submit(1, range(10), max_tokens=3))
    assert driver.run() == 3
    assert [plan.num_batched_tokens for plan in driver.plans] == [10, 1, 1]
    assert [output.finish_reason for output in answer.outputs] == [None, None, FinishReason.MAX_TOKENS]
    driver.check_answers()


def test_long_prompt_is_chunked_around_decodes() -> None:
    """Each step holds all decodes, and the long prompt gets exactly what they leave of the budget."""
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.submit(make_submit(1, range(3), max_tokens=20))
    driver.submit(make_submit(2, range(4), max_tokens=20))
    driver.step()
    driver.submit(make_submit(3, range(100, 120), max_tokens=2))
    chunks = []
    for _ in range(4):
        driver.step()
        assert scheduled(driver)[1] == scheduled(driver)[2] == 1
        chunks.append(scheduled(driver)[3])
    assert chunks == [8, 8, 4, 1]


def test_several_prompts_share_a_step() -> None:
    """Waiting requests are let in, in order, until the budget is spent; the last one gets a chunk."""
    driver = Driver(make_config(max_num_batched_tokens=16))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, range(100 * request_id, 100 * request_id + 7)))
    driver.step()
    assert scheduled(driver) == {1: 7, 2: 7, 3: 2}
    assert driver.plans[-1].sampled_seq_ids == (1, 2)


def test_seats() -> None:
    """No more than max_num_seqs run at a time, and the next is let in when one ends."""
    driver = Driver(make_config(max_num_seqs=2))
    for request_id in (1, 2, 3):
        driver.submit(make_submit(request_id, [request_id], max_tokens=request_id + 1))
    driver.step()
    driver.step()
    assert set(scheduled(driver)) == {1, 2}
    driver.step()
    assert set(scheduled(driver)) == {2, 3}


def test_steady_step_reuses_its_lists() -> None:
    """While the same sequences decode, a plan is the last one's lists and no changes."""
    driver = Driver(make_config(block_size=16))
    for request_id in (1, 2):
        driver.submit(make_submit(request_id, [request_id], max_tokens=14))
    driver.step()
    first, *others = [driver.step() for _ in range(10)]
    assert first is not None
    for plan in others:
        assert plan is not None
        assert plan.seq_ids is first.seq_ids
        assert plan.num_scheduled_tokens is first.num_scheduled_tokens
        changes = (plan.new, plan.resumed, plan.new_block_ids, plan.preempted_seq_ids, plan.finished_seq_ids)
        assert not any(changes)


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5])
def test_growth_comes_just_in_time(prompt_len: int) -> None:
    """A decoding sequence gets a block in the step that needs it, not before."""
    driver = Driver(make_config(block_size=4))
    driver.submit(make_submit(1, range(prompt_len), max_tokens=12))
    driver.run()
    num_blocks = len(driver.plans[0].new[0].block_ids)
    for num_decodes, plan in enumerate(driver.plans[1:], start=1):
        num_blocks += sum(len(block_ids) for block_ids in plan.new_block_ids.values())
        assert num_blocks == -(-(prompt_len + num_decodes) // 4)


def test_schedule_and_update_alternate() -> None:
    """A second plan before the first one's update is a bug of ours, and so is a second update."""
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_submit(1, [1]))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(AssertionError):
        scheduler.schedule()
    result = FakeRunner(num_kv_blocks=64, block_size=4).execute(plan)
    scheduler.update_from_output(plan, result)
    with pytest.raises(AssertionError):
        scheduler.update_from_output(plan, result)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("max_model_len", "num_kv_blocks", "num_tokens_max"), [(20, 64, 20), (256, 4, 16)], ids=["context", "pool"]
)
def test_what_never_fits_is_refused_at_once(max_model_len: int, num_kv_blocks: int, num_tokens_max: int) -> None:
    """A request with no room for even one new token is refused; one that has room for just one gets it."""
    driver = Driver(make_config(max_model_len=max_model_len, num_kv_blocks=num_kv_blocks))
    with pytest.raises(RequestNeverFitsError):
        driver.submit(make_submit(1, range(num_tokens_max)))
    with pytest.raises(RequestNeverFitsError):
        driver.submit(make_submit(1, range(num_tokens_max - 2), max_tokens=9, resume_token_ids=(1, 2, 3)))
    assert not driver.scheduler.has_work
    answer = driver.submit(make_submit(1, range(num_tokens_max - 1), max_tokens=9))
    driver.run()
    assert (len(answer.token_ids), answer.end) == (1, FinishReason.CONTEXT_LIMIT)


@pytest.mark.parametrize("indexes", [(), (1, 0), (2, 2)])
def test_sequences_must_be_told_apart(indexes: tuple[int, ...]) -> None:
    """No sequences, or such as are not in ascending order, are a bug of the sender's, and leave nothing behind."""
    scheduler = Scheduler(make_config())
    submit = replace(make_submit(1, [1]), sequences=tuple(SequenceStart(index) for index in indexes))
    with pytest.raises(ValueError, match="must be ascending"):
        scheduler.add_request(submit)
    assert not scheduler.has_work


def test_empty_prompt_is_refused() -> None:
    """A request without a prompt has no position to compute logits at."""
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        Scheduler(make_config()).add_request(make_submit(1, []))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "num_kv_blocks"), [(8, 7, 64), (0, 8, 64), (8, 8, 0)]
)
def test_impossible_bounds(max_num_seqs: int, max_num_batched_tokens: int, num_kv_blocks: int) -> None:
    """Bounds under which a step could not hold every running sequence are a configuration error."""
    with pytest.raises(ValueError, match="must be at least"):
        Scheduler(
            make_config(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_kv_blocks=num_kv_blocks,
            )
        )


# ------------------------------------------------------------------------------------------------- resumed requests


def test_resume_gives_what_would_have_followed() -> None:
    """A request resumed after k of its tokens gets exactly the rest, counted from the start."""
    config = make_config()
    whole, end = reference_output(make_submit(1, range(6), max_tokens=9), vocab_size=50, max_model_len=256)
    for num_resumed in range(1, 9):
        driver = Driver(config)
        submit = make_submit(1, range(6), max_tokens=9, resume_token_ids=whole[:num_resumed])
        answer = driver.submit(submit)
        driver.run()
        assert tuple(answer.token_ids) == whole[num_resumed:]
        assert answer.end is end


@pytest.mark.parametrize(
    ("resume_token_ids", "prompt_len", "expected"),
    [
        ((5, 6, 7, 8), 3, FinishReason.MAX_TOKENS),
        ((5, 1), 3, FinishReason.EOS),
        ((5, 2), 3, FinishReason.STOP_TOKEN),
        ((5,), 19, FinishReason.CONTEXT_LIMIT),
    ],
)
def test_resume_at_the_end(resume_token_ids: tuple[int, ...], prompt_len: int, expected: FinishReason) -> None:
    """A request whose resumed tokens already ended it is over at once: no step, no tokens, the reason."""
    scheduler = Scheduler(make_config(max_model_len=20))
    outputs = scheduler.add_request(
        make_submit(
            1,
            range(prompt_len),
            max_tokens=4,
            eos_token_ids=(1,),
            stop_token_ids=(2,),
            resume_token_ids=resume_token_ids,
        )
    )
    assert outputs == (SequenceOutput(1, 0, (), finish_reason=expected, num_cached_tokens=0),)
    assert not scheduler.has_work


# ------------------------------------------------------------------------------------------------------ aborts, ends


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_frees_blocks_at_once(num_steps: int) -> None:
    """Aborting frees the blocks in the call itself, in line, in prefill and in decode; again is no error."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, range(20), max_tokens=9))
    for _ in range(num_steps):
        driver.step()
    driver.abort(1)
    assert driver.scheduler.stats().num_used_kv_blocks == 0
    assert not driver.scheduler.has_work
    driver.abort(1, 99)


def test_abort_in_flight() -> None:
    """What a step brought to a sequence aborted meanwhile is ignored, its neighbour's is not; the runner is told."""
    driver = Driver(make_config())
    aborted = driver.submit(make_submit(1, range(5)))
    neighbour = driver.submit(make_submit(2, range(7, 12)))
    driver.step()
    driver.step(while_in_flight=lambda: driver.abort(1))
    assert (len(aborted.token_ids), len(neighbour.token_ids)) == (1, 2)
    driver.step()
    assert driver.plans[-1].finished_seq_ids == (1,)
    driver.run()
    driver.check_answers()


def test_blocks_freed_in_flight_are_not_mistaken_for_computed() -> None:
    """What the step of an aborted sequence was still to compute is not found in the prefix cache."""
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.submit(make_submit(1, range(16)))
    driver.step()
    driver.step(while_in_flight=lambda: driver.abort(1))
    answer = driver.submit(make_submit(2, range(16)))
    driver.run()
    assert answer.outputs[0].num_cached_tokens == 8
    driver.check_answers()


def test_runner_is_not_told_of_what_it_never_saw() -> None:
    """A request aborted in line never appears in a plan; one that ran is forgotten in the next one."""
    driver = Driver(make_config(max_num_seqs=1))
    driver.submit(make_submit(1, [1], max_tokens=2))
    driver.submit(make_submit(2, [2]))
    driver.abort(2)
    driver.run()
    driver.submit(make_submit(3, [3]))
    driver.run()
    assert [seq_id for plan in driver.plans for seq_id in plan.finished_seq_ids] == [1]
    assert driver.runner.seq_ids == {3}


def test_non_finite_row_fails_its_request_alone() -> None:
    """A request whose logits are not finite fails; its neighbours go on, and its blocks are found by nobody."""
    driver = Driver(make_config(max_num_batched_tokens=64), poison_token_id=49)
    poisoned = driver.submit(make_submit(1, [*range(12), 49]))
    neighbour = driver.submit(make_submit(2, range(20, 30), max_tokens=6))
    driver.step()
    assert (poisoned.end, poisoned.token_ids) == (FailureKind.NON_FINITE, [])
    later = driver.submit(make_submit(3, range(14)))
    driver.run()
    assert later.outputs[0].num_cached_tokens == 0
    assert neighbour.end is FinishReason.MAX_TOKENS
    driver.check_answers()


def test_non_finite_in_a_later_chunk_takes_back_earlier_blocks() -> None:
    """Blocks that a failing request had put into the prefix cache in earlier steps are taken out again."""
    driver = Driver(make_config(max_num_batched_tokens=8), poison_token_id=49)
    driver.submit(make_submit(1, [*range(12), 49]))
    driver.run()
    later = driver.submit(make_submit(2, range(12)))
    driver.run()
    assert later.outputs[0].num_cached_tokens == 0


def test_logprobs_are_passed_on() -> None:
    """A request that asked for logprobs gets one per new token, its neighbour none."""
    driver = Driver(make_config())
    asked = driver.submit(make_submit(1, [1], num_logprobs=0))
    driver.submit(make_submit(2, [2]))
    driver.run()
    assert [output.logprobs[0].logprob for output in asked.outputs if output.logprobs] == [
        -float(token_id) for token_id in asked.token_ids
    ]


# ------------------------------------------------------------------------------------------------------ prefix cache


def test_prefix_hit_is_reported_once() -> None:
    """The first output tells the cached prompt tokens, whole blocks and less than the prompt; the totals add up."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(12), max_tokens=2))
    driver.run()
    answer = driver.submit(make_submit(2, range(12), max_tokens=2))
    driver.run()
    assert [output.num_cached_tokens for output in answer.outputs] == [8, None]
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens_total, stats.num_cached_tokens_total) == (24, 8)
    driver.check_answers()


def test_generated_blocks_are_hit() -> None:
    """A next turn, whose prompt is the last one with its answer, finds the answer's full blocks too."""
    driver = Driver(make_config())
    first = driver.submit(make_submit(1, range(6), max_tokens=10))
    driver.run()
    second = driver.submit(make_submit(2, [*range(6), *first.token_ids, 7]))
    driver.run()
    # 16 tokens, the last of which was sampled but never computed.
    assert second.outputs[0].num_cached_tokens == 12
    driver.check_answers()


def test_hit_is_shared_while_both_run() -> None:
    """Two running requests with a common prefix hold its blocks once."""
    driver = Driver(make_config())
    driver.submit(make_submit(1, range(16), max_tokens=20))
    driver.step()
    driver.submit(make_submit(2, range(16), max_tokens=20))
    driver.step()
    assert driver.scheduler.stats().num_used_kv_blocks == 4 + 1 + 1  # 16 tokens and one; the second's own last block
    driver.run()
    driver.check_answers()


# ------------------------------------------------------------------------------------------------------------ stats


def test_stats() -> None:
    """The gauges tell running, waiting, their tokens and the held blocks; all are back to zero at the end."""
    driver = Driver(make_config(max_num_seqs=1))
    driver.submit(make_submit(1, range(9), max_tokens=2))
    driver.submit(make_submit(2, range(100, 105), max_tokens=2))
    assert driver.scheduler.stats() == EngineStats(num_waiting=2, num_waiting_tokens=14, num_kv_blocks=64)
    driver.step()
    assert driver.scheduler.stats() == EngineStats(
        num_running=1,
        num_waiting=1,
        num_waiting_tokens=5,
        num_used_kv_blocks=3,
        num_kv_blocks=64,
        num_prompt_tokens_total=9,
    )
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.num_used_kv_blocks) == (0, 0, 0, 0)


@pytest.mark.slow
def test_long_line_costs_nothing_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full batch and 10,000 in line, a step looks at none of those in line."""
    driver = Driver(make_config(max_num_seqs=4))
    scheduler, runner = driver.scheduler, driver.runner
    for request_id in range(1, 10_001):
        scheduler.add_request(make_submit(request_id, [request_id % 50], max_tokens=20))
    lookups: list[int] = []
    find_prefix = scheduler._kv.find_prefix

    def counting(sequence: Sequence) -> list[int]:
        lookups.append(sequence.seq_id)
        return find_prefix(sequence)

    monkeypatch.setattr(scheduler._kv, "find_prefix", counting)
    for _ in range(18):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update_from_output(plan, runner.execute(plan))
    assert lookups == [1, 2, 3, 4, 5]  # the four let in, and the first that found no seat
