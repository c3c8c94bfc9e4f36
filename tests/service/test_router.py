"""The choice of a replica, and the counts that it rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import SamplingParams, SequenceStart, StoppingParams, Submit
from service.router import RUN_TOKENS, Candidate, Router

BOTH = (Candidate(0), Candidate(1))


def submit(request_id: int, prompt: tuple[int, ...] = (1, 2), *, max_tokens: int = 10, **more: object) -> Submit:
    return Submit(request_id, prompt, SamplingParams(), StoppingParams(max_tokens), **more)  # type: ignore[arg-type]


def runs(*values: int) -> tuple[int, ...]:
    """A prompt of so many whole runs, each of one id."""
    return tuple(value for value in values for _ in range(RUN_TOKENS))


def test_nobody_is_chosen_where_there_is_nobody() -> None:
    """No candidate: None; one: it, whatever it has to do."""
    router = Router(2)
    assert router.choose([], submit(1)) is None
    router.on_sent(1, submit(1, max_tokens=10**6))
    assert router.choose([Candidate(1)], submit(2)) == 1


def test_the_replica_with_least_to_do_is_chosen() -> None:
    """Counted in tokens, not in requests."""
    router = Router(3)
    router.on_sent(0, submit(1, max_tokens=100))
    router.on_sent(1, submit(2, max_tokens=30))
    router.on_sent(1, submit(3, max_tokens=30))
    router.on_sent(2, submit(4, max_tokens=90))
    assert router.choose([Candidate(0), Candidate(1), Candidate(2)], submit(5)) == 1
    assert router.choose([Candidate(0), Candidate(2)], submit(5)) == 2


def test_outputs_and_ends_make_room() -> None:
    """The prompt counts until the first output, max_tokens as far as they are not produced; an end gives back the rest,
    once."""
    router = Router(2)
    router.on_sent(0, submit(1, (1,) * 50, max_tokens=20))
    assert router.num_outstanding_tokens(0) == 70
    router.on_output(1, 1)
    assert router.num_outstanding_tokens(0) == 19
    router.on_output(1, 4)
    assert router.num_outstanding_tokens(0) == 15
    for _ in range(2):
        router.on_end(1)
        assert router.num_outstanding_tokens(0) == 0
    router.on_output(1, 5)
    assert router.num_outstanding_tokens(0) == 0


def test_resumed_tokens_are_computed_but_not_produced_again() -> None:
    """And each sequence of a request produces its own."""
    router = Router(2)
    router.on_sent(0, submit(1, (1,) * 50, max_tokens=20, sequences=(SequenceStart(0, (7,) * 15),)))
    assert router.num_outstanding_tokens(0) == 50 + 15 + 5
    router.on_sent(
        1,
        submit(2, (1,) * 50, max_tokens=20, sequences=(SequenceStart(0), SequenceStart(1), SequenceStart(3, (7,) * 5))),
    )
    assert router.num_outstanding_tokens(1) == 50 + 5 + 20 + 20 + 15


def test_a_prefix_attracts_as_long_as_it_is_worth_the_imbalance() -> None:
    """Two tokens of imbalance for each token matched; beyond that the other replica is better."""
    for max_tokens, expected in ((2 * RUN_TOKENS * 3 - 1, 0), (2 * RUN_TOKENS * 3 + 1, 1)):
        router = Router(2)
        router.on_sent(0, submit(1, runs(1, 2, 3)))
        router.on_end(1)
        router.on_sent(0, submit(2, max_tokens=max_tokens - 2))
        assert router.num_outstanding_tokens(0) == max_tokens
        assert router.choose(BOTH, submit(3, (*runs(1, 2, 3), 9))) == expected


@pytest.mark.parametrize(
    "other",
    [
        submit(9, (9, *runs(1, 2, 3)[:-1])),  # the same ids at other places
        submit(9, runs(2, 3, 1)),
        submit(9, runs(1, 2, 3)[: RUN_TOKENS - 1]),  # not one whole run
        submit(9, runs(1, 2, 3), cache_salt="other"),
        submit(9, runs(1, 2, 3), cache_bypass=True),
        submit(9, (9, *runs(1)[1:], *runs(2, 3))),  # a later run matches only behind an equal beginning
    ],
)
def test_only_an_equal_prefix_attracts(other: Submit) -> None:
    """Equal from the first id on, in whole runs, with the same salt."""
    router = Router(2)
    router.on_sent(0, submit(1, runs(1, 2, 3)))
    router.on_end(1)
    router.on_sent(0, submit(2, (5,), max_tokens=1))
    assert router.choose(BOTH, other) == 1
    assert router.choose(BOTH, submit(8, runs(1, 2, 4))) == 0


def test_what_bypasses_the_cache_is_not_remembered() -> None:
    """The engine will not have it."""
    router = Router(2)
    router.on_sent(0, submit(1, runs(1, 2), cache_bypass=True))
    assert router.choose(BOTH, submit(2, runs(1, 2))) == 1


def test_a_suspect_is_chosen_only_where_there_is_no_other() -> None:
    """However much less it has to do, and whatever prefix it has."""
    router = Router(2)
    router.on_sent(0, submit(1, runs(1, 2, 3)))
    router.on_end(1)
    router.on_sent(1, submit(2, max_tokens=1000))
    request = submit(3, runs(1, 2, 3))
    assert router.choose([Candidate(0, is_suspect=True), Candidate(1)], request) == 1
    assert router.choose([Candidate(0, is_suspect=True), Candidate(1, is_suspect=True)], request) == 0


def test_a_death_clears_what_is_known_of_a_replica() -> None:
    """Neither its load nor its prefixes outlive it; the others' do. Late news of its requests are ignored."""
    router = Router(2)
    router.on_sent(0, submit(1, runs(1)))
    router.on_sent(1, submit(2, runs(2)))
    before = router.num_outstanding_tokens(1)
    router.on_death(0)
    assert (router.num_outstanding_tokens(0), router.num_outstanding_tokens(1)) == (0, before)
    router.on_output(1, 1)
    router.on_end(1)
    assert router.num_outstanding_tokens(0) == 0
    router.on_end(2)
    router.on_sent(0, submit(3, (7,), max_tokens=1))
    assert router.choose(BOTH, submit(4, runs(1))) == 1
    assert router.choose(BOTH, submit(4, runs(2))) == 1


def num_matched_runs(router: Router, request: Submit) -> int:
    """How many runs of it replica 0 is thought to have, by the load that they outweigh. Replica 1 is idle."""
    for count in range(1, 100):
        load = submit(10**6, (3,), max_tokens=2 * RUN_TOKENS * count - 2)  # with its prompt one less than `count` runs
        router.on_sent(0, load)
        chosen = router.choose(BOTH, request)
        router.on_end(load.request_id)
        if chosen == 1:
            return count - 1
    raise AssertionError


def test_the_memory_is_bounded_and_forgets_the_ends_of_prompts_first() -> None:
    """What is left of a prefix is its beginning, also of one that is longer than the whole memory."""
    router = Router(2, num_runs_max=4)
    for request_id, prompt in enumerate((runs(*range(10)), runs(50, 51)), 1):
        router.on_sent(0, submit(request_id, prompt))
        router.on_end(request_id)
        assert len(router._replicas[0].runs) == 4
    assert num_matched_runs(router, submit(3, runs(*range(10)))) == 2
    assert num_matched_runs(router, submit(3, runs(50, 51))) == 2


def test_the_memory_keeps_what_is_in_use() -> None:
    """The prefix not sent for the longest goes first."""
    router = Router(2, num_runs_max=4)
    for request_id, prompt in enumerate((runs(1, 2), runs(10, 11), runs(1, 2), runs(20, 21)), 1):
        router.on_sent(0, submit(request_id, prompt))
        router.on_end(request_id)
    matched = [num_matched_runs(router, submit(9, runs(first, first + 1))) for first in (1, 10, 20)]
    assert matched == [2, 0, 2]


def test_with_one_replica_no_prompt_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no choice, so it must not cost anything."""
    router = Router(1)
    router.on_sent(0, submit(1, runs(1, 2, 3)))
    assert not router._replicas[0].runs
    assert router.choose([Candidate(0)], submit(2, runs(1))) == 0


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["send", "output", "end", "death"]), st.integers(0, 2), st.integers(0, 30)),
        max_size=80,
    )
)
def test_the_load_is_the_sum_of_what_is_not_done(events: list[tuple[str, int, int]]) -> None:
    """Whatever comes in whatever order, no count goes below 0, and when all has ended all are 0."""
    router = Router(3)
    num_sent = 0
    for what, index, number in events:
        match what:
            case "send":
                num_sent += 1
                router.on_sent(index, submit(num_sent, (1,) * (number + 1), max_tokens=number + 1))
            case "output":
                router.on_output(number, index + 1)
            case "end":
                router.on_end(number)
            case "death":
                router.on_death(index)
        by_request = [0, 0, 0]
        for request in router._requests.values():
            by_request[request.index] += request.num_tokens
        assert [router.num_outstanding_tokens(i) for i in range(3)] == by_request
        assert min(by_request) >= 0
    for request_id in range(num_sent + 1):
        router.on_end(request_id)
    assert [router.num_outstanding_tokens(i) for i in range(3)] == [0, 0, 0]
