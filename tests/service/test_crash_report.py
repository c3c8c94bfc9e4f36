"""What a report holds, what it never holds, and what happens to its file."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from scheduler.flight_record import FlightRecord, StepShape
from scheduler.messages import EngineFailed, Phase
from service.crash_report import (
    NUM_REQUESTS_MAX,
    SCHEMA,
    STACKS_CHARS_MAX,
    STALE_S,
    Aftermath,
    CrashFacts,
    EndFacts,
    EngineFacts,
    MemoryFacts,
    RequestFacts,
    build_report,
    read_memory,
    write_report,
)
from tests.service.support import CapturedLogs

DEATH_ID = "0123456789abcdef0123456789abcdef"
STEPS = tuple(StepShape(18_000 - n, 3, 130, 1, 0, 128) for n in range(16))
FACTS = CrashFacts(
    death_id=DEATH_ID,
    time_s=1_800_000_000.25,
    server_version="0.1.0",
    engine=EngineFacts(1, 4242, 3600.0, was_starting=False, model="tiny", device="cpu", dtype="float32"),
    end=EndFacts("the engine closed its socket", signal="SIGSEGV", oom_kills=0, last_lines=["Fatal Python error"]),
    flight=FlightRecord(Phase.EXECUTE, 1, 18_000, 77, STEPS),
    requests=[RequestFacts(17, "chat-42", 12, 34), RequestFacts(18, "", was_alone=True)],
    memory=MemoryFacts(engine_rss_bytes=10**9),
    aftermath=Aftermath(5, 2, None, [17, 18], restart_delay_s=0.5, num_deaths_in_window=2, num_restarts_max=5),
)


def report_of(**changes: Any) -> dict[str, Any]:
    return build_report(dataclasses.replace(FACTS, **changes))


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_a_report_has_what_is_known_in_plain_values() -> None:
    """It survives JSON unchanged, and each fact is where a tool would look for it."""
    report = report_of()
    assert json.loads(json.dumps(report)) == report
    assert report["schema"] == SCHEMA
    assert report["time"] == "2027-01-15T08:00:00.250+00:00"
    assert report["engine"]["pid"] == 4242
    assert (report["signal"], report["exit_status"], report["oom_kills"]) == ("SIGSEGV", None, 0)
    assert (report["phase"], report["step_id"]) == ("EXECUTE", 18_000)
    assert len(report["steps"]) == 16
    assert report["steps"][0]["num_batched_tokens"] == 130
    assert report["requests"][0] == {
        "request_id": 17,
        "label": "chat-42",
        "num_prompt_tokens": 12,
        "num_output_tokens": 34,
        "was_alone": False,
    }
    assert report["blame"] == {"killer": None, "suspects": [17, 18]}
    assert report["streams"] == {"num_ended": 5, "num_replayed": 2}
    assert report["restart"]["delay_s"] == 0.5
    assert report["exception"] is None


def test_the_engines_own_word_goes_before_the_recorder() -> None:
    """It knows its phase and step better than a page read from outside."""
    own = EngineFailed("builtins.RuntimeError", "m" * 5000, "t" * 100_000, Phase.UPDATE, 18_001, "batch", False)
    report = report_of(end=EndFacts("RuntimeError in phase UPDATE", exit_status=1, report=own))
    assert (report["phase"], report["step_id"]) == ("UPDATE", 18_001)
    assert report["exception"]["type"] == "builtins.RuntimeError"
    assert len(report["exception"]["message"]) <= 2048
    assert len(report["exception"]["traceback"]) <= 16 * 1024


def test_every_list_and_text_is_bounded() -> None:
    """A report is small whatever the death was, and what is cut is counted."""
    requests = [RequestFacts(n, "é" * 1000, 1, 1) for n in range(1000)]
    end = EndFacts("c" * 10**6, stacks="first\n" + "s" * 10**6 + "\nlast", last_lines=["l" * 10**5] * 1000)
    report = report_of(requests=requests, end=end, aftermath=Aftermath(suspect_ids=range(1000)))
    assert report["num_requests"] == 1000
    assert len(report["requests"]) == NUM_REQUESTS_MAX
    assert len(report["requests"][0]["label"]) == 64
    assert len(report["stacks"]) <= STACKS_CHARS_MAX
    assert report["stacks"].startswith("first")
    assert report["stacks"].endswith("last")
    assert "characters left out" in report["stacks"]
    assert len(report["last_lines"]) == 50
    assert len(json.dumps(report)) < 128 * 1024


def test_a_report_has_no_place_for_prompts() -> None:
    """Of a request there are its numbers and its label, nothing else; this list is what a reviewer has to agree to."""
    assert {field.name for field in dataclasses.fields(RequestFacts)} == {
        "request_id",
        "label",
        "num_prompt_tokens",
        "num_output_tokens",
        "was_alone",
    }


def test_a_report_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    """A directory made for it is 0700, the file 0600; the name tells time and death, the content is the report."""
    directory = tmp_path / "state" / "crashes"
    path = write_report(directory, report_of())
    assert path == directory / f"death-20270115T080000Z-{DEATH_ID}.json"
    assert json.loads(path.read_text()) == report_of()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert names_in(directory) == [path.name]


def test_text_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    """What an engine wrote may hold half a surrogate pair; the file is still JSON."""
    path = write_report(tmp_path, report_of(end=EndFacts("a\udc80b")))
    assert path is not None
    assert json.loads(path.read_text())["cause"] == "a\udc80b"


def test_only_so_many_reports_are_kept(tmp_path: Path) -> None:
    """The oldest go first; whatever is not a report of ours stays, whatever it is called."""
    others = [
        "notes.txt",
        "death-1.json",
        "death-20270115T080000Z-xyz.json",
        f"death-20270115T080000Z-{DEATH_ID}.json~",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / f"death-20000101T000000Z-{'a' * 32}.json").mkdir()
    (tmp_path / f"death-20000101T000001Z-{'a' * 32}.json").symlink_to(tmp_path / "notes.txt")
    kept = set(names_in(tmp_path))
    paths = [write_report(tmp_path, report_of(time_s=1.8e9 + n), keep=3) for n in range(10)]
    assert {path.name for path in paths[-3:] if path is not None} == set(names_in(tmp_path)) - kept
    assert kept <= set(names_in(tmp_path))


def test_the_report_just_written_is_kept_though_the_clock_went_back(tmp_path: Path) -> None:
    """By its name it is the oldest; it is also the one that will be looked for."""
    for n in range(3):
        write_report(tmp_path, report_of(time_s=1.8e9 + n), keep=3)
    path = write_report(tmp_path, report_of(time_s=1.7e9), keep=3)
    assert path is not None
    assert path.exists()
    assert len(names_in(tmp_path)) == 3


def test_what_a_killed_writer_left_is_removed_later(tmp_path: Path) -> None:
    """Not at once: another server may be writing it."""
    names = [f".death-20270115T080000Z-{letter * 32}.json.77.tmp" for letter in "ab"]
    for name in names:
        (tmp_path / name).write_text("{")
    old_s = (tmp_path / names[0]).stat().st_mtime - STALE_S - 1
    os.utime(tmp_path / names[0], (old_s, old_s))
    write_report(tmp_path, report_of())
    assert not (tmp_path / names[0]).exists()
    assert (tmp_path / names[1]).exists()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, log: CapturedLogs) -> None:
    """A file where the directory should be, a disk without room: the death goes on, and nothing half-written stays."""
    (tmp_path / "file").write_text("")
    assert write_report(tmp_path / "file", report_of()) is None
    assert write_report(tmp_path / "file" / "below", report_of()) is None
    assert write_report(tmp_path / "a\0b", report_of()) is None
    records = log.of("crash report not written")
    assert [record["level"] for record in records] == ["warning"] * 3
    assert all(record["reason"] for record in records)


def test_a_report_that_breaks_off_leaves_nothing(
    tmp_path: Path, log: CapturedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the whole file is there or none."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert write_report(tmp_path, report_of()) is None
    assert names_in(tmp_path) == []
    assert log.of("crash report not written")[0]["reason"] == "No space left on device"


def test_memory_is_read_where_the_system_tells(tmp_path: Path) -> None:
    """Of the machine and of our control group; "max" is no limit."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/emberline.slice\n")
    (tmp_path / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:       7 kB\n")
    group = tmp_path / "fs" / "emberline.slice"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("2000\n")
    (group / "memory.events").write_text("low 0\nhigh 3\nmax 9\noom 1\noom_kill 1\n")
    facts = read_memory(5, proc=tmp_path, cgroup=tmp_path / "fs")
    assert facts == MemoryFacts(5, 7 * 1024, 1000, 2000, {"low": 0, "high": 3, "max": 9, "oom": 1, "oom_kill": 1})
    (group / "memory.max").write_text("max\n")
    assert read_memory(proc=tmp_path, cgroup=tmp_path / "fs").cgroup_max_bytes is None


def test_where_the_system_tells_nothing_nothing_is_known(tmp_path: Path) -> None:
    """Another system, an old kernel: no facts, no error."""
    assert read_memory(proc=tmp_path, cgroup=tmp_path) == MemoryFacts()
    assert isinstance(read_memory(), MemoryFacts)
