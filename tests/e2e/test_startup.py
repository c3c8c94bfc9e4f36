"""How a server starts, and how it says that it cannot."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.crowd import SMALL, endless
from tests.e2e.harness import ROOT, ReflectionClient, Server, default_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 60.0
"""Whatever takes longer hangs."""
EMBERLINE = ROOT / ".venv" / "bin" / "emberline"
"""The installed command: scripts/serve would fetch what a test wants to be missing."""


@pytest.fixture
def refuse() -> Iterator[Callable[..., Server]]:
    """`refuse("--flag", "value", …)`: a server that has ended by itself, nobody left behind."""
    servers: list[Server] = []

    def run(*arguments: str, **options: Any) -> Server:
        server = Server(*arguments, **options).spawn()
        servers.append(server)
        server.wait(LIMIT_S)
        assert server.leftovers() == []
        return server

    yield run
    for server in servers:
        server.kill()


def expect_one_line(server: Server, exit_code: int, *words: str) -> str:
    """It ended with this code and one line on stderr, which holds the words."""
    assert server.returncode == exit_code, server.raw_stderr
    (line,) = server.raw_stderr.splitlines()
    for word in words:
        assert word in line
    return line


def test_serving_is_told_once_with_the_address(server: Server) -> None:
    """One `serving` event names the address; port 0 has become a free one, on the loopback interface."""
    (record,) = server.events("serving")
    host, _, port = record["address"].rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536
    with socket.create_connection((host, int(port)), timeout=LIMIT_S):
        pass


def test_loading_shows_progress(server: Server) -> None:
    """The stages of loading are told in order, before `serving`."""
    events = [record["event"] for record in server.logs]
    stages = [record["stage"] for record in server.events("engine loading")]
    assert len(stages) == len(set(stages)) >= 3
    assert events.index("engine starting") < events.index("engine loading") < events.index("serving")


def test_a_taken_port_fails_before_anything_loads(
    server: Server, refuse: Callable[..., Server], tmp_path: Path
) -> None:
    """A second server on the port of the first ends with exit code 3 and one line that names it; no engine starts."""
    port = server.address.rpartition(":")[2]
    termination_log = tmp_path / "termination"
    second = refuse(port=port, termination_log=termination_log)
    line = expect_one_line(second, 3, f"127.0.0.1:{port}", "in use")
    assert json.loads(line)["event"] == "could not start"
    assert f"127.0.0.1:{port}" in termination_log.read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--step-deadline", "nan"], "--step-deadline"),
        (["--port", "65536"], "--port"),
        (["--dtype", "float8"], "--dtype"),
        (["--log-level", "chatty"], "--log-level"),
        (["--kv-cache-memory", "a lot"], "--kv-cache-memory"),
        (["--num-kv-blocks", "64", "--kv-cache-memory", "1G"], "--num-kv-blocks"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "--max-num-batched-tokens"),
        (["--termination-log", "/no/such/directory/file"], "--termination-log"),
        (["--model", "/no/such/model"], "--model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_named(refuse: Callable[..., Server], arguments: list[str], named: str) -> None:
    """A flag that is unknown, out of range or at odds with another: exit code 2 and one line that names it."""
    expect_one_line(refuse(*arguments, port=None), 2, named)


def test_a_flag_of_a_later_version_is_refused(refuse: Callable[..., Server]) -> None:
    """What this version does not do it does not accept in silence: exit code 2, one line."""
    expect_one_line(refuse("--quantization", "int8"), 2, "--quantization", "not available in this version")


def test_a_wrong_environment_variable_is_named(refuse: Callable[..., Server]) -> None:
    """A flag's value from the environment is held to the same rules, and the line names the variable."""
    expect_one_line(refuse(env={"EMBERLINE_MAX_NUM_SEQS": "-1"}), 2, "EMBERLINE_MAX_NUM_SEQS")


def test_a_missing_default_model(refuse: Callable[..., Server], tmp_path: Path) -> None:
    """Without the default model the installed command says in one line how to get it: exit code 3."""
    termination_log = tmp_path / "termination"
    server = refuse(
        command=[EMBERLINE, "serve"], env={"EMBERLINE_CACHE": str(tmp_path / "cache")}, termination_log=termination_log
    )
    line = expect_one_line(server, 3, "scripts/install", "--model")
    assert termination_log.read_text().strip() in line


def _model_dir(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model's directory with all but weights; the tokenizer is the default model's."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_dir() / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TINY = {"vocab_size": 49152, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral", "sliding_window": 64, **TINY, **HEADS}, ["mistral", "window"]),
        ({"model_type": "mamba", "state_size": 8, **TINY}, ["mamba"]),
        ({"model_type": "t5", "vocab_size": 49152, "d_model": 16, "num_layers": 1}, ["t5"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_an_unsupported_family_is_refused_by_name(
    refuse: Callable[..., Server], tmp_path: Path, config: dict[str, Any], words: list[str]
) -> None:
    """A family that the engine cannot run exactly: exit code 2, one line with its name; no `fatal error`, no
    traceback.
    """
    server = refuse(model=_model_dir(tmp_path, config))
    assert server.returncode == 2, server.raw_stderr
    (record,) = [record for record in server.logs if record["level"] in ("error", "critical")]
    assert record["event"] == "configuration error"
    for word in words:
        assert word in record["reason"]
    assert "\n" not in record["reason"]
    assert "Traceback" not in server.raw_stderr


def test_missing_weights(refuse: Callable[..., Server], tmp_path: Path) -> None:
    """A directory without weights: exit code 3, one line, which the termination log has, too."""
    termination_log = tmp_path / "termination"
    config = json.loads((default_model_dir() / "config.json").read_text())
    model = tmp_path / "model"
    model.mkdir()
    server = refuse(model=_model_dir(model, config), termination_log=termination_log)
    assert server.returncode == 3, server.raw_stderr
    (record,) = [record for record in server.logs if record["level"] in ("error", "critical")]
    assert record["event"] == "could not start"
    assert record["reason"] == termination_log.read_text().removesuffix("\n")
    assert "\n" not in record["reason"]
    assert "Traceback" not in server.raw_stderr


def test_calls_during_the_start() -> None:
    """The port answers before the model is there: calls are told ENGINE_STARTING and when to come back, readiness is
    NOT_SERVING, liveness SERVING; a Watch that began then is told of SERVING.
    """
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(port=port, **SMALL).spawn()
    try:
        server.wait_for_log("engine starting", LIMIT_S)
        with ReflectionClient(f"127.0.0.1:{port}") as client, client.health.watch("readiness") as watch:
            refused = client.generate(**endless("Too early", max_tokens=1), timeout_s=LIMIT_S)
            states = client.health.list()
            watch.wait_for("NOT_SERVING")
            engine = client.call("InfoService/GetServerInfo").engines[0]
            is_early = not server.events("serving")
            with pytest.raises(grpc.RpcError) as info:
                client.call("InfoService/GetModelInfo")

            assert is_early, "the start was over before the calls were made"
            refused.expect(grpc.StatusCode.UNAVAILABLE, "ENGINE_STARTING")
            assert refused.status.pushback_ms is not None
            assert refused.status.pushback_ms > 0
            # As soon as its files are read, which may be now.
            assert states.pop("emberline.v1.TokenizerService") in ("SERVING", "NOT_SERVING")
            assert states == {
                "": "NOT_SERVING",
                "readiness": "NOT_SERVING",
                "emberline.v1.InferenceService": "NOT_SERVING",
                "emberline.v1.InfoService": "SERVING",
                "liveness": "SERVING",
            }
            assert engine.pid == server.engine_pid()
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE

            begun_s = time.monotonic()
            server.wait_until_serving()
            watch.wait_for("SERVING")
            assert watch.states == ["NOT_SERVING", "SERVING"]
            client.generate(**endless("At last", max_tokens=2)).expect_ok()
            print(f"serving {time.monotonic() - begun_s:.1f} s after the first calls")
            (record,) = server.events("serving")
            print(f"start to serving: {record['startup_s']} s")
        assert server.stop() == 0
    finally:
        server.kill()
