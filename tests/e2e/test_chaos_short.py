"""The fault suite in short: a seeded storm of the faults that end soonest, as `scripts/chaos run` does it at length.

Its judge is tested in tests/scripts/test_chaos_rules.py; here it judges a real server with the default model.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAULTS = ("kill", "raise in forward", "cancel storm", "abort in step", "clock")
"""Signals, code, clients and the host: one each of what takes moments; hangs wait for their deadline."""
LIMIT_S = 540.0


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """One run's verdict."""
    path = tmp_path_factory.mktemp("chaos") / "storm.json"
    sizes = ["--faults", str(len(FAULTS)), "--streams", "24", "--asks", "10", "--clients", "6", "--seed", "1"]
    command = [ROOT / "scripts" / "chaos", "run", "--scenario", "storm", "--cold", "--fault", *FAULTS, *sizes]
    run = subprocess.run([*command, "--json", path], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(run.stdout, run.stderr)
    assert run.returncode in (0, 1), run.stderr
    (outcome,) = json.loads(path.read_text())["scenarios"]
    return outcome


def test_no_stream_notices_what_its_engine_goes_through(storm: dict[str, object]) -> None:
    """With replay nothing hung, lost, repeated, changed or leaked; each death has one record; the stop is clean."""
    assert storm["violations"] == []
    assert storm["hung"] == 0


def test_the_storm_was_one(storm: dict[str, object]) -> None:
    """Every fault was committed, engines died of them, and streams were there to notice."""
    assert storm["faults"] == dict.fromkeys(FAULTS, 1)
    assert storm["deaths"] == 2
    assert isinstance(storm["exact"], int)
    assert storm["exact"] >= 15
