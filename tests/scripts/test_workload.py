from __future__ import annotations

import random
from collections import Counter

import pytest

from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.workload import Workload, lengths, log_uniform, plain_ids, requests

VOCAB = range(100, 1000)


def test_the_same_arguments_give_the_same_requests() -> None:
    """A workload is a function of its arguments alone, whatever was drawn before."""
    first = requests(Workload(seed=7), "a", VOCAB)
    random.random()
    assert requests(Workload(seed=7), "a", VOCAB) == first


def test_the_default_workload_stays_the_one_that_was_measured() -> None:
    """The recorded figures are of these very lengths, on any version of Python."""
    of_all = lengths(Workload())
    assert (len(of_all), of_all[:4]) == (96, [(457, 243), (400, 140), (49, 67), (69, 107)])
    assert tuple(map(sum, zip(*of_all, strict=True))) == (13924, 8964)


def test_a_label_changes_the_ids_and_not_the_lengths() -> None:
    """Two levels do the same work, and no prompt of one shares a prefix with a prompt of the other."""
    one, other = (requests(Workload(), label, range(5000, 44000)) for label in ("concurrency 1", "concurrency 8"))
    assert [len(request.prompt_ids) for request in one] == [len(request.prompt_ids) for request in other]
    assert [request.num_output_tokens for request in one] == [request.num_output_tokens for request in other]
    assert len({request.prompt_ids[:16] for request in one + other}) == 2 * 96


def test_lengths_lie_within_both_bounds() -> None:
    """Both ends can occur, nothing beyond them."""
    workload = Workload(num_requests=5000, prompt_tokens_min=1, prompt_tokens_max=4)
    assert {prompt for prompt, _ in lengths(workload)} == {1, 2, 3, 4}
    assert log_uniform(random.Random(0), 9, 9) == 9


def test_every_doubling_is_equally_likely() -> None:
    """Log-uniform: as many prompts of 16 to 31 tokens as of 256 to 511."""
    drawn = Counter(prompt.bit_length() for prompt, _ in lengths(Workload(num_requests=10_000, prompt_tokens_max=511)))
    assert sorted(drawn) == [5, 6, 7, 8, 9]
    assert all(1800 < count < 2200 for count in drawn.values())


def test_avoided_ids_never_occur() -> None:
    """Ids come from the range less what is to be avoided."""
    used = {
        token_id for request in requests(Workload(), "a", range(10, 14), avoid=[11]) for token_id in request.prompt_ids
    }
    assert used == {10, 12, 13}


def test_a_vocabulary_without_plain_ids_is_refused() -> None:
    """Nothing to draw from is an error, not an endless search."""
    with pytest.raises(BenchmarkError):
        requests(Workload(), "a", range(3), avoid=[0, 1, 2])


def test_plain_ids_leave_out_both_ends() -> None:
    """Control tokens stand first or last in every family's vocabulary."""
    assert plain_ids(49_152) == range(4915, 49_152 - 4915)
