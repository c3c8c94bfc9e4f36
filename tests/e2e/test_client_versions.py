"""`pip install emberline` on the oldest and the newest that its metadata admits, against the real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMOKE = Path(__file__).with_name("client_smoke.py")
LIST = "import json; from importlib.metadata import *; print(json.dumps({d.name: d.version for d in distributions()}))"
INSTALL_LIMIT_S = 240.0
RUN_LIMIT_S = 120.0
NO_INDEX = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|Temporary failure in name resolution|ProxyError"
)
"""What pip says of an index that cannot be reached; anything else that it says is a failure of ours."""


def floors() -> list[str]:
    """Each dependency at the lowest version that is admitted."""
    project = tomllib.loads((ROOT / "protos" / "pyproject.toml").read_text())["project"]
    pins = []
    for requirement in project["dependencies"]:
        match = re.fullmatch(r"([a-z]+)>=([0-9.]+),<[0-9]+", requirement)
        assert match is not None, f"{requirement}: a floor and a ceiling are wanted"
        pins.append(f"{match[1]}=={match[2]}")
    return pins


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, as it would be published."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "protos"  # pip builds in the source's folder
    shutil.copytree(ROOT / "protos", source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    pip("wheel", "--no-deps", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def install(directory: Path, wheel: Path, *pins: str) -> Path:
    """An environment of its own with `emberline` in it; its bin folder."""
    # By the running one's pip: to put another into each environment takes longer than all the rest.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=INSTALL_LIMIT_S)
    pip("--python", directory / "bin" / "python", "install", "--only-binary", ":all:", wheel, *pins)
    return directory / "bin"


def pip(*arguments: str | Path) -> None:
    """Skips the test if the index cannot be reached, and only then."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode != 0 and NO_INDEX.search(done.stderr):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_the_client_alone(server: Server, wheel: Path, tmp_path: Path, versions: str) -> None:
    """With grpcio and protobuf and nothing else, every kind of call works, without a warning; so do the commands."""
    bin_folder = install(tmp_path / "venv", wheel, *(floors() if versions == "lowest" else ()))
    listed = subprocess.check_output([bin_folder / "python", "-P", "-c", LIST], timeout=RUN_LIMIT_S)
    found = json.loads(listed)
    # typing-extensions is grpcio's own.
    assert set(found) - {"typing_extensions"} == {"emberline", "grpcio", "protobuf"}
    print(versions, found)
    if versions == "lowest":
        assert [f"{name}=={found[name]}" for name in ("grpcio", "protobuf")] == floors()
    smoke = subprocess.run(
        [bin_folder / "python", "-P", "-W", "error", SMOKE, server.address],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert (smoke.returncode, smoke.stdout, smoke.stderr) == (0, "smoke: fine\n", "")
    command = [bin_folder / "emberline", "generate", "The capital of France is", "--temperature=0", "--max-tokens=8"]
    told = subprocess.run(
        [*command, "--address", server.address], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert " Paris" in told.stdout
    script = bin_folder / "emberline"
    health = subprocess.run([script, "health", "--address", server.address], check=False, timeout=RUN_LIMIT_S)
    assert health.returncode == 0
    listing = subprocess.check_output([script, "--help"], text=True, timeout=RUN_LIMIT_S)
    commands = [line.split()[0] for line in listing.splitlines() if line.startswith("  ")]
    assert commands == ["generate", "health"], "the server's commands come with the server"
