"""The screen for each class of death, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.flight_record import FlightRecord, StepShape
from scheduler.messages import EngineFailed, Phase
from service import autopsy, cli, crash_report
from service.autopsy import COLUMNS_MAX, COLUMNS_MIN, LINES_MAX, Death, classify, parse, render
from service.crash_report import (
    Aftermath,
    CrashFacts,
    EndFacts,
    EngineFacts,
    MemoryFacts,
    RequestFacts,
    build_report,
    write_report,
)

STACKS = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000000 (most recent call first):
  File "/opt/app/.venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125 in forward
  File "/opt/app/scheduler/model/model_runner.py", line 77 in execute
  File "/opt/app/scheduler/engine/process.py", line 150 in _run
  File "/opt/app/scheduler/engine/process.py", line 68 in main
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/app/scheduler/engine/process.py", line 150, in _run
    outputs = core.step()
  File "/opt/app/scheduler/model/sampler.py", line 9, in sample
    raise RuntimeError("the root cause")
RuntimeError: the root cause
"""
SEGFAULT = (
    "a line before",
    "Fatal Python error: Segmentation fault",
    "Thread 0x00007f0298c4b6c0 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 327 in wait',
    "Current thread 0x00007f0000000000 (most recent call first):",
    '  File "/opt/app/scheduler/model/attention/cpu.py", line 31 in forward',
    "Extension modules: numpy._core._multiarray_umath (total: 1)",
)


def failed(exception_type: str = "builtins.RuntimeError", *, starting: bool = False) -> EngineFailed:
    return EngineFailed(exception_type, "the root cause", TRACEBACK, Phase.EXECUTE, 17, "", starting)


STARTING = EngineFacts(0, 4242, 3.25, was_starting=True, model="tiny")
POISONED = Aftermath(3, 4, 18, [17], 0.5, 2, 5)
CASES: dict[str, tuple[Death, dict[str, Any], tuple[str, ...]]] = {
    "oom": (
        Death.OUT_OF_MEMORY,
        {"end": EndFacts("the engine closed its socket", signal="SIGKILL", oom_kills=1)},
        ("memory ran out", "--kv-cache-memory", "control group 900 MiB of 1.00 GiB", "OOM kills 1"),
    ),
    "killed": (
        Death.KILLED,
        {"end": EndFacts("the engine closed its socket", signal="SIGKILL", oom_kills=0)},
        ("SIGKILL from outside", "Find who sent it"),
    ),
    "killed, uncounted": (
        Death.KILLED,
        {"end": EndFacts("the engine closed its socket", signal="SIGKILL")},
        ("OOM kills not told", "or the kernel did", "1. This system does not count OOM kills"),
    ),
    "segfault": (
        Death.NATIVE,
        {"end": EndFacts("the engine closed its socket", signal="SIGSEGV", oom_kills=0, last_lines=SEGFAULT)},
        ("SIGSEGV", "Fatal Python error: Segmentation fault", "model/attention/cpu.py:31 forward", "--threads 1"),
    ),
    "abort": (Death.NATIVE, {"end": EndFacts("x", signal="SIGABRT", last_lines=["terminate called"])}, ("SIGABRT",)),
    "bus": (Death.NATIVE, {"end": EndFacts("x", signal="SIGBUS")}, ("SIGBUS", "/dev/shm", "memory-mapped")),
    "terminated": (Death.SIGNALLED, {"end": EndFacts("x", signal="SIGTERM")}, ("SIGTERM", "streams finish")),
    "a signal without a name": (Death.SIGNALLED, {"end": EndFacts("x", signal="signal 40")}, ("signal 40",)),
    "hang": (
        Death.HANG,
        {"end": EndFacts("step deadline", signal="SIGKILL", was_killed_by_us=True, was_hung=True, stacks=STACKS)},
        ("It hung", "torch/nn/modules/linear.py:125 forward", "--step-deadline", "SIGKILL (ours)"),
    ),
    "hang without stacks": (
        Death.HANG,
        {"end": EndFacts("step deadline", signal="SIGKILL", was_killed_by_us=True, was_hung=True)},
        ("It hung", "1. It could not give its Python stack any more", "SIGSTOP"),
    ),
    "exception": (
        Death.EXCEPTION,
        {"end": EndFacts("RuntimeError in phase EXECUTE", exit_status=1, report=failed())},
        ("builtins.RuntimeError: the root cause", "scheduler/model/sampler.py:9 sample", "report the traceback"),
    ),
    "out of memory in torch": (
        Death.EXCEPTION_MEMORY,
        {"end": EndFacts("x", exit_status=1, report=failed("torch.OutOfMemoryError"))},
        ("It could not get memory", "--gpu-memory-utilization"),
    ),
    "memory error": (
        Death.EXCEPTION_MEMORY,
        {"end": EndFacts("x", exit_status=1, report=failed("builtins.MemoryError"))},
        ("RLIMIT_AS",),
    ),
    "exit 0": (Death.EXIT_ZERO, {"end": EndFacts("x", exit_status=0)}, ("exit status 0", "--trust-remote-code")),
    "exit 127": (Death.EXIT_OTHER, {"end": EndFacts("x", exit_status=127)}, ("exit status 127", "interpreter")),
    "lost": (
        Death.LOST,
        {"end": EndFacts("the engine sent bytes that are no message", signal="SIGKILL", was_killed_by_us=True)},
        ("connection", "report it"),
    ),
    "not reaped": (Death.UNKNOWN, {"end": EndFacts("x")}, ("not reaped", "wchan")),
    "starting": (
        Death.EXCEPTION,
        {"engine": STARTING, "requests": (), "end": EndFacts("x", exit_status=1, report=failed(starting=True))},
        ("It died while starting", "no request has a part in it", "none was being computed", "up 3.2 s"),
    ),
    "starting, killed": (
        Death.OUT_OF_MEMORY,
        {"engine": STARTING, "requests": (), "end": EndFacts("x", signal="SIGKILL", oom_kills=2)},
        ("It died while starting. The kernel killed it", "--kv-cache-memory"),
    ),
    "poison": (
        Death.NATIVE,
        {"end": EndFacts("x", signal="SIGSEGV", last_lines=SEGFAULT), "aftermath": POISONED},
        (
            "Request #18 did it",
            "#18 nightly-batch · 3 prompt + 1 output tokens · alone, as a suspect · KILLER",
            "POISON",
        ),
    ),
}


def facts_of(**changes: Any) -> CrashFacts:
    steps = tuple(StepShape(18_000 - n, 3, 130 - n, 1, 0, 128) for n in range(16))
    facts = CrashFacts(
        death_id="0123456789abcdef0123456789abcdef",
        time_s=1_800_000_000.25,
        server_version="0.1.0",
        engine=EngineFacts(1, 4242, 11_000.0, was_starting=False, model="tiny", device="cpu", dtype="float32"),
        end=EndFacts("the engine closed its socket"),
        flight=FlightRecord(Phase.EXECUTE, 1, 18_000, 77, steps),
        requests=[RequestFacts(17, "chat-42", 12, 34), RequestFacts(18, "nightly-batch", 3, 1, was_alone=True)],
        memory=MemoryFacts(2**30, 2**31, 900 * 2**20, 2**30),
        aftermath=Aftermath(5, 2, None, [17, 18], restart_delay_s=0.5, num_deaths_in_window=2, num_restarts_max=5),
    )
    return dataclasses.replace(facts, **changes)


def report_of(**changes: Any) -> dict[str, Any]:
    return build_report(facts_of(**changes))


def is_one_screen(screen: str, width: int = COLUMNS_MAX) -> bool:
    lines = screen.split("\n")
    return len(lines) <= LINES_MAX and all(len(line) <= width and line.isprintable() for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_each_class_of_death_has_its_words(name: str) -> None:
    """What happened, the evidence and the advice are those of the class, all on one screen of any width."""
    death, changes, words = CASES[name]
    report = report_of(**changes)
    assert classify(report) is death
    screen = render(report)
    assert is_one_screen(screen)
    flat = " ".join(screen.split())
    for word in words:
        assert word in flat
    assert "WHAT TO DO 1. " in flat
    for width in (COLUMNS_MIN, 72):
        assert is_one_screen(render(report, width), width)


def test_every_class_is_shown_by_a_case() -> None:
    """A new class of death needs advice and a case above."""
    assert {death for death, _, _ in CASES.values()} == set(Death) == set(autopsy._ADVICE)


def test_the_place_and_the_aftermath_are_told() -> None:
    """Replica, process, model, step and its shapes; what became of the streams and of the engine's place."""
    flat = " ".join(render(report_of()).split())
    for word in (
        "ENGINE DEATH 0123456789abcdef0123456789abcdef 2027-01-15 08:00:00.250 UTC · emberline-server 0.1.0",
        "replica 1 · pid 4242 · up 3 h · serving",
        "model tiny · in float32 · on cpu phase",
        "phase EXECUTE of step 18000",
        "step 18000: 3 sequences, 130 tokens, 1 new, 0 preempted ",
        "0 preempted · before it 129, 128, 127, 126 tokens ",
        "#17 chat-42 · 12 prompt + 34 output tokens",
        "engine 1.00 GiB",
        "streams ended 5 · replayed 2 · restart delayed by 0.5 s (2 deaths in the window, 5 allowed)",
    ):
        assert word in flat
    gone = report_of(aftermath=Aftermath(5, 0, num_deaths_in_window=6, num_restarts_max=5))
    assert "not started again" in render(gone)


def test_of_a_hang_the_engines_own_thread_is_shown() -> None:
    """Not whichever was written first; its innermost frame at the top."""
    screen = render(report_of(**CASES["hang"][1]))
    assert "threading.py" not in screen
    assert screen.index("linear.py:125") < screen.index("model_runner.py:77") < screen.index("process.py:68")


@pytest.mark.parametrize("lines", [SEGFAULT, SEGFAULT[2:]])
def test_of_a_fatal_signal_the_thread_that_had_it_is_shown(lines: tuple[str, ...]) -> None:
    """Also where the last lines that were kept begin after the title."""
    screen = render(report_of(end=EndFacts("x", signal="SIGSEGV", last_lines=lines)))
    assert "attention/cpu.py:31 forward" in screen
    assert "threading.py" not in screen
    assert "Extension modules" not in screen


def test_what_faulthandler_really_writes_is_understood() -> None:
    """A real segmentation fault beside a waiting thread: the frames of the fault are on the screen, and no others."""
    code = (
        "import ctypes, faulthandler, resource, threading; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
        "faulthandler.enable(); threading.Thread(target=threading.Event().wait, daemon=True).start(); "
        "ctypes.string_at(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stderr.splitlines() if line]
    screen = render(report_of(end=EndFacts("x", signal="SIGSEGV", last_lines=lines)))
    assert "Fatal Python error: Segmentation fault" in screen
    assert " string_at\n" in screen
    assert "threading.py" not in screen


def test_however_much_there_is_the_advice_is_on_the_screen() -> None:
    """Many requests, a long traceback, a long cause: what is cut is neither the killer nor what to do."""
    deep = TRACEBACK.replace("Traceback", "\n".join(f'  File "/a/b/c/d.py", line {n}, in f' for n in range(500)))
    own = dataclasses.replace(failed(), message="m" * 5000, traceback=deep)
    screen = render(
        report_of(
            end=EndFacts("c " * 3000, exit_status=1, report=own),
            requests=[RequestFacts(n, f"label-{n}", n, n) for n in range(500)],
            aftermath=Aftermath(killer_id=40),
        )
    )
    assert is_one_screen(screen)
    assert "500 in the dying step" in screen
    assert "#40 label-40" in screen
    assert "and 496 more" in screen
    assert "RuntimeError: the root cause" in screen
    assert screen.rstrip().split("\n")[-1].startswith(("  3.", "     "))


def test_nothing_unprintable_reaches_the_terminal() -> None:
    """A label can hold escape sequences, line ends and marks that turn writing round; wide letters take two columns."""
    labels = ["\x1b[2J\x1b]0;pwned\x07", "a\nb\rc", "\u202egnirts", "日本語" * 30]
    report = report_of(requests=[RequestFacts(n, label, 1, 1) for n, label in enumerate(labels)])
    screen = render(report)
    assert is_one_screen(screen)
    assert "?[2J" in screen
    wide = next(line for line in screen.split("\n") if "日本語" in line)
    assert len(wide) < 60


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), name=st.sampled_from(sorted(CASES)))
def test_any_report_is_rendered(data: st.DataObject, name: str) -> None:
    """Whatever a field was replaced by, or if it is missing, there is a screen and no exception."""
    report = json.loads(json.dumps(report_of(**CASES[name][1])))
    for _ in range(data.draw(st.integers(1, 4))):
        target = report
        while True:
            key = data.draw(st.sampled_from(sorted(target)))
            if not (isinstance(target[key], dict) and target[key] and data.draw(st.booleans())):
                break
            target = target[key]
        if data.draw(st.booleans()):
            target[key] = data.draw(JSON)
        elif len(target) > 1:
            del target[key]
    assert is_one_screen(render(report))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ("not json", "no JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "no crash report"),
        ("{}", "no crash report"),
        ('{"schema": 1}', "no crash report"),
        ('{"schema": 1, "death_id": 7}', "no crash report"),
        ('{"schema": 2, "death_id": "d"}', "schema 2; this version reads 1"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(text: str, why: str) -> None:
    """One line, whatever the file is."""
    with pytest.raises(autopsy.NoReportError, match=why):
        parse(text)


def test_both_ends_agree_on_the_schema() -> None:
    """What is written can be read."""
    assert autopsy.SCHEMA == crash_report.SCHEMA
    assert parse(json.dumps(report_of())) == report_of()


# The command


def test_the_command_shows_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`emberline autopsy FILE` prints what `render` gives, and ends with 0."""
    path = write_report(tmp_path, report_of())
    assert cli.main(["autopsy", str(path)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("ENGINE DEATH 0123456789abcdef0123456789abcdef\n")
    assert told.err == ""


def test_the_command_gives_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, for other tools."""
    path = write_report(tmp_path, report_of())
    assert cli.main(["autopsy", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == report_of()


def test_of_a_directory_the_command_shows_the_newest_and_names_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen of the last death, then the older files, the newest first; what is no report is passed over, and
    --json gives that one report alone.
    """
    times = ("2026-01-02T00:00:00.5+00:00", "2026-03-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00")
    paths = [
        write_report(tmp_path, report_of() | {"time": time, "death_id": f"{n}{n}"}) for n, time in enumerate(times)
    ]
    (tmp_path / "zzz.json").write_text("{}")
    assert cli.main(["autopsy", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ENGINE DEATH 11"
    assert lines[-3:] == ["OLDER REPORTS", f"  {paths[2]}", f"  {paths[0]}"]
    assert cli.main(["autopsy", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["death_id"] == "11"


def test_the_command_refuses_what_is_no_report_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one clear line: no such file, a directory, another file, bytes."""
    (tmp_path / "text").write_text("hello")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none", "No such file"), (".", "directory"), ("text", "no JSON"), ("bytes", "no text")):
        assert cli.main(["autopsy", str(tmp_path / name)]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("emberline: error: ")
        assert why in told.err
        assert told.err.count("\n") == 1


def test_the_command_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line is one line and exit code 2, too."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["autopsy"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_command_starts_nothing_and_needs_no_terminal(tmp_path: Path) -> None:
    """As a process of its own, into a pipe, in a locale without Unicode: the screen, and neither grpc nor torch."""
    path = write_report(tmp_path, report_of(requests=[RequestFacts(1, "日本", 1, 1)]))
    code = (
        "import sys; from service import cli; code = cli.main(sys.argv[1:]); "
        "sys.exit(code or int(any(name in sys.modules for name in ('grpc', 'torch'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "autopsy", str(path)],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"ENGINE DEATH")
