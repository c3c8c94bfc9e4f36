from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks.__main__ import main, parser, split
from scripts.benchmarks.report import milliseconds, table


def test_flags_after_the_dashes_are_the_servers() -> None:
    """Only the first `--` parts them; the server gets the rest unread."""
    assert split(["serve", "--requests", "4", "--", "--host", "x", "--"]) == (
        ["serve", "--requests", "4"],
        ["--host", "x", "--"],
    )
    assert split(["death"]) == (["death"], [])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "--requests", "0"],
        ["serve", "--concurrency", "8", "x"],
        ["serve", "--prompt-tokens", "9", "8"],
        ["serve", "--time-limit-s", "nan"],
        ["serve", "--output", "figures.txt"],
        ["serve", "--output", "/no/such/directory/figures.json"],
        ["serve", "--address", "127.0.0.1:1", "--", "--threads", "2"],
        ["death", "--repeat", "-1"],
        ["limits", "--parts", "nothing"],
        ["limits", "--stalled", "0"],
    ],
)
def test_wrong_flags_end_at_once_with_status_2(arguments: list[str]) -> None:
    """Nothing is started, and no hour is spent before a wrong path is found out."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_the_defaults_are_the_workload_of_the_records() -> None:
    """96 requests at 1, 8 and 32, prompts of 16 to 512 tokens, outputs of 16 to 256."""
    options = parser().parse_args(["serve"])
    assert (options.requests, options.concurrency, options.seed) == (96, [1, 8, 32], 0)
    assert (options.prompt_tokens, options.output_tokens) == ((16, 512), (16, 256))
    assert parser().parse_args(["serve", "--output", "x.json"]).output == Path("x.json")


def test_no_server_at_the_address_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Load to other machines is refused the same way."""
    assert main(["serve", "--address", "192.0.2.1:50051"]) == 1
    assert (
        capsys.readouterr().err
        == "bench: '192.0.2.1:50051' is not on the loopback interface; load is sent nowhere else\n"
    )


def test_tables_are_markdown() -> None:
    """Every column is as wide as its widest cell."""
    assert table(["a", "long"], [["100", "1"]]) == "|   a | long |\n|----:|-----:|\n| 100 |    1 |"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0001234, "0.123"), (0.01234, "12.3"), (0.1234, "123"), (12.345, "12345")]
)
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    """Enough to compare, no more than was measured."""
    assert milliseconds(seconds) == text
