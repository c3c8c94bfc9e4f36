from __future__ import annotations

import pytest

from emberline.v1 import inference_pb2, info_pb2
from scripts.benchmarks.emberline_client import check, check_limits, loopback
from scripts.benchmarks.errors import BenchmarkError
from scripts.benchmarks.figures import Message, Stream
from scripts.benchmarks.workload import Request, Workload


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:50051", "127.0.0.1:50051"), ("127.9.9.9:1", "127.9.9.9:1"), ("[::1]:50051", "[::1]:50051")],
)
def test_loopback_addresses_are_taken(address: str, expected: str) -> None:
    """The host comes back as a number, so that the channel resolves nothing again."""
    assert loopback(address) == expected


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "192.0.2.1:50051", "[2001:db8::1]:1", "[::]:50051", ":50051"])
def test_load_is_sent_nowhere_but_to_loopback(address: str) -> None:
    """Addresses of other machines, and of all interfaces, are refused before a packet leaves."""
    with pytest.raises(BenchmarkError):
        loopback(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999999999999999999", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    """With a sentence, not with a traceback."""
    with pytest.raises(BenchmarkError):
        loopback(address)


def answer(reason: str = "FINISH_REASON_MAX_TOKENS", tokens: int = 4, completion: int = 4, prompt: int = 2) -> None:
    check(
        Request((8, 9), 4),
        Stream(0.0, (Message(1.0, 1), Message(2.0, tokens - 1)), 2.0, prompt, 0),
        inference_pb2.Finish(reason=inference_pb2.FinishReason.Value(reason)),
        inference_pb2.Usage(prompt=2, completion=completion),
    )


def test_a_stream_with_all_it_asked_for_passes() -> None:
    """The other tests of `check` differ from this one in one thing each."""
    answer()


@pytest.mark.parametrize(
    "difference",
    [
        {"reason": "FINISH_REASON_EOS"},
        {"reason": "FINISH_REASON_UNSPECIFIED"},
        {"tokens": 3},
        {"tokens": 5},
        {"completion": 3},
        {"prompt": 3},
    ],
)
def test_a_stream_with_less_or_more_fails_the_run(difference: dict[str, object]) -> None:
    """A server that stops early is no fast server."""
    with pytest.raises(BenchmarkError):
        answer(**difference)  # type: ignore[arg-type]


def test_a_workload_beyond_the_servers_limits_is_refused_before_it_is_sent() -> None:
    """The error names the number and the limit."""
    limits = info_pb2.Limits(max_prompt_tokens=512, max_output_tokens=256, max_model_len=768)
    check_limits(Workload(), limits)
    limits.max_model_len = 767
    with pytest.raises(BenchmarkError, match=r"768 tokens in all.* 767"):
        check_limits(Workload(), limits)
