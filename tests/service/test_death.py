"""What the one record of a death holds."""

from __future__ import annotations

from service.death import LINES_CHARS_IN_RECORD_MAX, LINES_IN_RECORD_MAX, last_lines


def test_the_record_has_the_last_lines_within_its_bound() -> None:
    """The newest, in their order, and few if they are long: native code writes whole pages as its last words, and one
    death may not fill the log."""
    lines = [f"line {number}" for number in range(1000)]
    assert last_lines(lines) == lines[-LINES_IN_RECORD_MAX:]
    long = [str(number) * 3000 for number in range(9)]
    assert last_lines(long) == long[-(LINES_CHARS_IN_RECORD_MAX // 3000) :]
    assert last_lines(["x" * 10**6]) == ["x" * LINES_CHARS_IN_RECORD_MAX]
    assert last_lines([]) == []
