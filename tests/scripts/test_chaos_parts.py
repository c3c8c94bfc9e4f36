"""The fault suite's other parts: what is sent, what is struck, the faults' own code, and flags."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fault_suite import asks, faults, figures, http2, scenarios
from scripts.fault_suite.__main__ import main
from scripts.fault_suite.arena import longest_silence_s
from scripts.fault_suite.history import Answer, Ask, Call, Message
from scripts.fault_suite.injected import FOLDER, Triggers
from scripts.fault_suite.server import Server

VOCAB_SIZE = 49_152

STAND_IN = """
import sys
sys.argv = ["emberline", "serve"]
sys.orig_argv = ["python", "emberline", "serve"]
sys.path[:0] = {paths}
import sitecustomize
from scheduler.core.scheduler import Scheduler
scheduler = Scheduler()
print(scheduler.schedule(), flush=True)
sys.stdin.readline()
try:
    print(scheduler.schedule(), flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
print(scheduler.schedule(), flush=True)
"""
PRODUCT = """
class Scheduler:
    def schedule(self):
        return "scheduled"
    add_request = update_from_output = schedule
"""


def test_a_seed_gives_its_asks_and_faults() -> None:
    """The same ones each time, and others for another seed."""
    one, other = asks.pool(1, 40, VOCAB_SIZE, [7]), asks.pool(2, 40, VOCAB_SIZE, [7])
    assert one == asks.pool(1, 40, VOCAB_SIZE, [7])
    assert one != other
    drawn = list(itertools.islice(asks.stream(1, one, {}), 200))
    assert drawn == list(itertools.islice(asks.stream(1, one, {}), 200))
    assert 5 < sum(ask.leave_after_tokens is not None for ask in drawn) < 60
    assert faults.schedule(1, 100) == faults.schedule(1, 100) != faults.schedule(2, 100)


def test_no_two_streams_are_alike_to_the_server() -> None:
    """Each has a mark, and none that its answer holds: that would end it."""
    pool = asks.pool(1, 4, VOCAB_SIZE)
    answers = {ask.number: Answer(tuple(asks.MARKS[:50]), "", "EOS") for ask in pool}
    drawn = list(itertools.islice(asks.stream(1, pool, answers), 200))
    assert len({json.dumps(ask.fields) for ask in drawn}) == len(drawn)
    for ask in drawn:
        marks = set(ask.fields["stopping"].get("stop_token_ids", ()))
        assert not marks & set(asks.MARKS[:50])


def test_the_load_is_mixed() -> None:
    """Greedy and seeded, text and ids, with stop strings and without; each asks for its token ids."""
    pool = asks.pool(0, 96, VOCAB_SIZE)
    greedy = sum(ask.fields["sampling"]["temperature"] == 0 for ask in pool)
    assert 24 < greedy < 72
    assert all(ask.fields["sampling"]["temperature"] == 0 or "seed" in ask.fields["sampling"] for ask in pool)
    assert 16 < sum("text" in ask.fields for ask in pool) < 60
    assert any("stop_strings" in ask.fields["stopping"] for ask in pool)
    assert all(ask.fields["output"]["token_ids"] for ask in pool)


def test_a_long_schedule_has_every_fault() -> None:
    """Each comes before any comes again; a short one has as many as were asked for."""
    assert {fault.name for fault in faults.schedule(3, len(faults.CATALOGUE))} == {f.name for f in faults.CATALOGUE}
    assert len(faults.schedule(3, 7)) == 7
    assert len(faults.schedule(3, 300)) == 300
    assert len({fault.name for fault in faults.CATALOGUE}) == len(faults.CATALOGUE)


@pytest.fixture
def stand_in(tmp_path: Path) -> subprocess.Popen[str]:
    """A process with a scheduler of three lines in the place of the product's."""
    package = tmp_path / "scheduler" / "core"
    package.mkdir(parents=True)
    (tmp_path / "scheduler" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "scheduler.py").write_text(PRODUCT)
    program = STAND_IN.format(paths=[str(FOLDER), str(tmp_path)])
    return subprocess.Popen(
        [sys.executable, "-ISc", program],
        env={**os.environ, "CHAOS_FOLDER": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_armed_place_fails_once(stand_in: subprocess.Popen[str], tmp_path: Path) -> None:
    """Not before it is armed, and not a second time; a place that is not there is told."""
    triggers = Triggers(tmp_path)
    assert stand_in.stdout is not None
    assert stand_in.stdout.readline() == "scheduled\n"
    triggers.commit("schedule", "raise")
    assert not triggers.is_done("schedule")
    output, _ = stand_in.communicate("\n", timeout=60)
    assert output.splitlines() == ["InjectedError", "scheduled"]
    assert triggers.is_done("schedule")
    assert triggers.missing() == ["metrics"]


def test_an_action_that_is_disarmed_in_time_is_not_committed(stand_in: subprocess.Popen[str], tmp_path: Path) -> None:
    """A fault that its process never came to must not strike in the middle of another one."""
    triggers = Triggers(tmp_path)
    assert stand_in.stdout is not None
    stand_in.stdout.readline()
    triggers.commit("schedule", "kill")
    triggers.disarm("schedule")
    output, _ = stand_in.communicate("\n", timeout=60)
    assert output.splitlines() == ["scheduled", "scheduled"]


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    """The installer, a tool, this test: none of them is patched, though it has the same environment."""
    env = {**os.environ, **Triggers(tmp_path).environment}
    program = "import sys, time; print(time.time.__module__, '_Finder' in {type(f).__name__ for f in sys.meta_path})"
    output = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    assert output == "time False\n"


def test_frames_are_frames() -> None:
    """Length, type, flags, stream, as RFC 9113 has them."""
    assert http2.frame(http2.PING, 0, 0, b"12345678") == b"\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678"


def test_the_longest_silence() -> None:
    """Between any two things that a client saw."""
    call = Call(Ask(0, {}), 1.0, [Message(2.0, "", ()), Message(5.0, "", ())], ended_s=5.5)
    assert longest_silence_s(call) == 3.0


async def test_a_log_that_is_not_read_does_not_get_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading is paused the writer waits on a small pipe; afterwards every record is there, and its end too."""
    serve = tmp_path / "serve"
    program = (
        "import json, sys\nsys.stdin = None\n"
        'print("installing", file=sys.stderr)\n'
        'for n in range(400): print(json.dumps({"event": "tick", "n": n, "pad": "x" * 200}), file=sys.stderr)\n'
        'print("strange", file=sys.stderr)\n'
    )
    serve.write_text(f"#!{sys.executable} -ISu\n{program}")
    serve.chmod(0o755)
    monkeypatch.setattr("scripts.fault_suite.server.SERVE", serve)
    server = Server((), {})
    server.pause_log()
    assert not await server.until(lambda: server.status is not None, 1.0)
    server.resume_log()
    assert await server.wait(30.0) == 0
    assert [record.fields["n"] for record in server.events("tick")] == list(range(400))
    assert server.strange_lines == ["strange"]
    server.close()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "--scenario", "no such"],
        ["run", "--fault", "no such"],
        ["run", "--faults", "0"],
        ["run", "--json", "figures.txt"],
        ["figures", "--figure", "no such"],
        ["soak", "--minutes", "0"],
    ],
)
def test_wrong_flags_end_at_once_with_status_2(arguments: list[str]) -> None:
    """Nothing is started, and no hour is spent before a wrong name is found out."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_the_list_names_every_fault_and_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be asked for can be looked up."""
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in (*(fault.name for fault in faults.CATALOGUE), *scenarios.SCENARIOS):
        assert name in text


def test_memory_growth_is_told_from_the_collectors_noise() -> None:
    """Two megabytes up and down do not hide 100 bytes a stream, nor make them up."""
    noise = [0, 2_000_000, 400_000, 1_500_000, 0, 900_000, 2_000_000]
    points = [(1000 * n, 10**8 + noise[n % len(noise)]) for n in range(21)]
    assert abs(figures.slope(points)) < 64
    assert 64 < figures.slope([(x, y + 139 * x) for x, y in points]) < 220


def test_a_figure_that_was_not_run_is_not_called_reached() -> None:
    """The hour of saturation is left out unless it is asked for."""
    row = figures.soak_row(None)
    assert row.is_reached is None
    assert "not run" in figures.table([row])
