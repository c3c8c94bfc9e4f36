"""The client carries its streams through the death of a whole server: `scripts/chaos run --scenario client`, in short.

At length it is 200 streams and three deaths; docs/reliability.md has the figures.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 540.0
NUM_STREAMS = 12


def test_no_caller_notices_the_death_of_a_server(tmp_path: Path) -> None:
    """One of two servers is killed, front end and all, with streams in the middle of their text: none fails, and each
    is token for token what an undisturbed server says, whole, once, with the usage of one call.
    """
    path = tmp_path / "client.json"
    sizes = ["--streams", str(NUM_STREAMS), "--faults", "1", "--asks", "8", "--seed", "2"]
    command = [ROOT / "scripts" / "chaos", "run", "--scenario", "client", *sizes, "--json", path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    print(run.stdout, run.stderr)
    assert run.returncode in (0, 1), run.stderr
    (outcome,) = json.loads(path.read_text())["scenarios"]
    assert outcome["violations"] == []
    assert outcome["exact"] == outcome["ends"]["OK"] == NUM_STREAMS
    assert outcome["figures"]["open_at_death_1"] > 0
    assert outcome["figures"]["streams_resumed"] > 0, "there was nothing to carry"
