"""What a caller's type checker and editor know of the client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GOOD = """
from emberline.client import Answer, AsyncClient, Client, Resume, Tls, errors


def threads() -> int:
    with Client(["a:1", "b:2"], tls=Tls(), token=lambda: "t", resume=Resume(breaks_max=3)) as client:
        for delta in client.generate([1, 2], temperature=0, stop="x", logit_bias={1: 2.0}, timeout_s=3):
            text: str = delta.text
            if delta.usage is not None:
                return delta.usage.completion
        answer: Answer = client.complete(chat=[("user", text), {"role": "user", "content": "c"}], n=2)
        return client.model_info().limits.max_output_tokens + len(answer.completions)


async def coroutines(client: AsyncClient) -> str:
    try:
        return "".join([delta.text async for delta in client.generate("x", max_tokens=3)])
    except errors.EngineDeadError as error:
        return error.death_id or ""
"""
BAD = {
    'client.generate("x", max_token=3)': "call-arg",
    'client.generate("x", temperature="hot")': "arg-type",
    "client.generate(1.5)": "arg-type",
    'client.complete("x").txt': "attr-defined",
    "client.load().runing": "attr-defined",
}


@pytest.mark.slow
def test_callers_are_typed(tmp_path: Path) -> None:
    """Under mypy's strict mode good calls pass, and each mistake is found where it is made."""
    (tmp_path / "good.py").write_text(GOOD)
    lines = ["from emberline.client import Client", "client = Client()", *BAD]
    (tmp_path / "bad.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", "good.py", "bad.py"]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    found = sorted(line for line in told.stdout.splitlines() if "error:" in line)
    assert len(found) == len(BAD), told.stdout
    for number, (line, kind) in enumerate(zip(found, BAD.values(), strict=True), start=3):
        assert line.startswith(f"bad.py:{number}: error:")
        assert line.endswith(f"[{kind}]")
