from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.figures import Message, Stream, distribution, inter_token_gaps, percentile, summary


def stream(started_s: float, *messages: tuple[float, int], ended_s: float) -> Stream:
    return Stream(started_s, tuple(Message(*message) for message in messages), ended_s, 10, 0)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([5.0], 99, 5.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 50, 3.0),
        ([float(value) for value in range(101)], 99, 99.0),
        ([0.0, 10.0], 99, 9.9),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentiles_are_linear_between_ranks(values: list[float], percent: float, expected: float) -> None:
    """Type 7 of Hyndman and Fan, in any order of the values."""
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    """`statistics.quantiles`, inclusive, is the same definition."""
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, percent) for percent in range(1, 100)] == pytest.approx(expected, abs=1e-6)


def test_no_values_have_no_percentile() -> None:
    """An empty run has no figures rather than a zero."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_tokens_that_arrive_together_share_the_wait() -> None:
    """k tokens in a message count as k gaps of an equal share; the first message counts for nothing."""
    messages = [Message(1.0, 3), Message(2.0, 1), Message(5.0, 2)]
    assert inter_token_gaps(messages) == [1.0, 1.5, 1.5]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=50))
def test_gaps_add_up_to_the_time_after_the_first_message(parts: list[tuple[float, int]]) -> None:
    """No wait is counted twice and none is lost, however tokens are grouped."""
    at_s, messages = 0.0, []
    for wait_s, num_tokens in parts:
        at_s += wait_s
        messages.append(Message(at_s, num_tokens))
    gaps = inter_token_gaps(messages)
    assert len(gaps) == sum(message.num_tokens for message in messages[1:])
    assert sum(gaps) == pytest.approx(messages[-1].at_s - messages[0].at_s, abs=1e-9)


def test_throughput_counts_from_the_first_start_to_the_last_end() -> None:
    """All tokens over the whole time, the wait for the first one and the tail of the loop included."""
    figures = summary(
        [
            stream(0.0, (1.0, 1), (2.0, 1), ended_s=2.5),
            stream(0.5, (3.5, 2), (4.0, 2), ended_s=4.0),
        ]
    )
    assert (figures.num_output_tokens, figures.wall_s, figures.output_tokens_per_s) == (6, 4.0, 1.5)
    assert (figures.first_token.p50_s, figures.first_token.max_s) == (2.0, 3.0)
    assert (figures.inter_token.count, figures.inter_token.max_s) == (3, 1.0)
    assert figures.end_to_end.max_s == 3.5


def test_a_distribution_tells_its_size() -> None:
    """The count stands beside the percentiles: a p99 of three values is a maximum."""
    figures = distribution([1.0, 3.0, 2.0])
    assert (figures.count, figures.mean_s, figures.p50_s, figures.max_s) == (3, 2.0, 2.0, 3.0)
