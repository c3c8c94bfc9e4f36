"""Flags, the environment, and what is refused."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from scheduler.config import EngineConfig
from scheduler.errors import ConfigurationError, StartupError
from service import cli, config
from service.config import FLAGS, NOT_YET, ServerConfig, parse

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
# As the design lists them.
DESIGN_FLAGS = """
--model --served-model-name --revision --trust-remote-code --host --port --health-port --dtype --quantization
--device --attention-backend --threads --replicas --max-model-len --max-prompt-tokens --max-output-tokens
--max-num-seqs --max-num-batched-tokens --block-size --num-kv-blocks --kv-cache-memory --gpu-memory-utilization
--max-queue-requests --max-queue-tokens --step-deadline --on-engine-death --max-engine-restarts --standby
--drain-grace --metrics-port --log-format --log-level --termination-log --crash-dir --tls-cert --tls-key --tls-client-ca
--enable-admin
"""
ADDED_FLAGS = """
--allow-plaintext-network --auth-tokens --admin-clients --enable-channelz --stream-buffer-tokens --reader-timeout
--guide-compile-timeout --otlp-endpoint
"""
"""Those that it does not list."""


def namespace(*arguments: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["serve", *arguments])


def parsed(*arguments: str, model: str | None = "org/model", **environ: str) -> ServerConfig:
    return parse(namespace(*(("--model", model) if model else ()), *arguments), environ)


def test_every_flag_of_the_design_is_known() -> None:
    """The flags are those of the design and a few more, each once."""
    names = [f"--{flag.name}" for flag in FLAGS + NOT_YET]
    assert len(set(names)) == len(names)
    assert set(DESIGN_FLAGS.split()) | set(ADDED_FLAGS.split()) == set(names)


@pytest.mark.parametrize("path", ["x" * 300, "~nobody-of-that-name/crashes"])
def test_a_path_that_cannot_be_looked_at_is_one_clear_line(path: str) -> None:
    """Whatever the system says of a path, it is told as the flag's fault."""
    with pytest.raises(ConfigurationError, match="--crash-dir cannot be used: "):
        parsed("--crash-dir", path)


def test_defaults_are_valid_and_all_used() -> None:
    """Without flags there is a valid configuration, and every field of the engine's share comes from it."""
    plain = parsed(log_format="json")
    assert (plain.host, plain.port) == ("127.0.0.1", 50051)
    assert plain.served_model_name == "model"
    engine = plain.engine_config()
    assert {field.name for field in fields(EngineConfig)} == {field.name for field in fields(engine)}
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (64, 512)


def test_a_flag_beats_the_environment_which_beats_the_default() -> None:
    """All three sources are checked alike."""
    assert parsed(EMBERLINE_PORT="7").port == 7
    assert parsed("--port", "8", EMBERLINE_PORT="7").port == 8
    assert parsed(EMBERLINE_TRUST_REMOTE_CODE="yes").trust_remote_code
    assert not parsed(EMBERLINE_TRUST_REMOTE_CODE="0").trust_remote_code
    assert parsed("--trust-remote-code").trust_remote_code
    with pytest.raises(ConfigurationError, match="EMBERLINE_PORT"):
        parsed(EMBERLINE_PORT="x")


def test_an_empty_variable_is_an_absent_one() -> None:
    """A manifest writes "not set" so; an empty flag is still a mistake."""
    nothing = {flag.variable: "" for flag in FLAGS + NOT_YET if flag.key != "model"}
    assert parsed("--log-format", "json", **nothing) == parsed("--log-format", "json")
    with pytest.raises(ConfigurationError, match="--port"):
        parsed("--port", "")


WRONG = [
    ("--port", "65536"), ("--port", "-1"), ("--port", "1.5"), ("--max-num-seqs", "0"), ("--threads", "0"),
    ("--step-deadline", "nan"), ("--step-deadline", "0"), ("--drain-grace", "-1"), ("--drain-grace", "inf"),
    ("--gpu-memory-utilization", "0"), ("--gpu-memory-utilization", "1.01"), ("--kv-cache-memory", "1X"),
    ("--kv-cache-memory", "-2G"), ("--kv-cache-memory", "inf"), ("--dtype", "float8"), ("--log-level", "loud"),
    ("--host", "127.0.0.1:80"), ("--host", ""), ("--model", "/no/such/directory"), ("--model", "a/b/c"),
    ("--termination-log", "/no/such/directory/file"), ("--max-model-len", "1"), ("--served-model-name", ""),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), WRONG)
def test_a_value_out_of_range_is_refused_by_name(flag: str, value: str) -> None:
    """The one line names the flag."""
    with pytest.raises(ConfigurationError, match=flag):
        parsed(f"{flag}={value}", model=None if flag == "--model" else "org/model")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-num-seqs", "64", "--max-num-batched-tokens", "63"),
        ("--max-model-len", "100", "--max-prompt-tokens", "100"),
        ("--num-kv-blocks", "10", "--kv-cache-memory", "1G"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(arguments: tuple[str, ...]) -> None:
    """The line names both."""
    with pytest.raises(ConfigurationError) as caught:
        parsed(*arguments)
    assert arguments[0] in str(caught.value)
    assert arguments[2] in str(caught.value)


NEUTRAL = {"quantization": "none"}


@pytest.mark.parametrize("flag", NOT_YET, ids=lambda flag: flag.name)
def test_a_flag_of_a_later_version_is_refused_unless_it_changes_nothing(flag: config.Flag) -> None:
    """Silence would be a lie; the neutral value is no lie."""
    value = () if flag.is_switch else ("2",)
    with pytest.raises(ConfigurationError, match=f"--{flag.name}.*not available in this version"):
        parsed(f"--{flag.name}", *value)
    with pytest.raises(ConfigurationError, match=flag.variable):
        parsed(**{flag.variable: "1" if flag.is_switch else "2"})
    if flag.name in NEUTRAL:
        parsed(f"--{flag.name}", NEUTRAL[flag.name])


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1048576", 2**20), ("512M", 2**29), ("2GiB", 2**31), ("1.5g", 3 * 2**29), ("3 GB", 3 * 2**30)],
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    """Bytes, or powers of 1024."""
    assert parsed("--kv-cache-memory", text).kv_cache_memory_bytes == size_bytes


def test_what_kubernetes_injects_is_explained() -> None:
    """A Service called emberline sets EMBERLINE_PORT to an URL in every pod; the line says what to do."""
    with pytest.raises(ConfigurationError, match="enableServiceLinks"):
        parsed(EMBERLINE_PORT="tcp://10.0.0.1:50051")


def test_a_missing_default_model_says_how_to_get_it(tmp_path: Path) -> None:
    """No model in the cache is a failure to start (3), not a wrong flag (2)."""
    with pytest.raises(StartupError, match="scripts/install"):
        parsed(model=None, EMBERLINE_CACHE=str(tmp_path))
    directory = tmp_path / "models" / config.DEFAULT_MODEL_NAME
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert parsed(model=None, EMBERLINE_CACHE=str(tmp_path)).served_model_name == config.DEFAULT_MODEL_NAME


def test_the_message_limit_holds_the_largest_prompt(tmp_path: Path) -> None:
    """It grows with the context, which comes from the flags or the model's own files."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1_000_000}))
    assert parsed(model=str(tmp_path)).max_request_bytes() > 50_000_000
    assert parsed("--max-prompt-tokens", "100").max_request_bytes() < 5_000_000
    assert parsed(model="org/model").context_tokens() == config.CONTEXT_TOKENS_UNKNOWN


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["serve", "--no-such-flag"], 2), (["serve", "--port", "x"], 2), (["serve", "--replicas", "0"], 2), ([], 2)],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 2, and stderr has one line."""
    monkeypatch.setenv("EMBERLINE_MODEL", "org/model")
    with pytest.raises(SystemExit) as caught:
        sys.exit(cli.main(arguments))
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("emberline")


def test_help_tells_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names each flag, its environment variable, and what this version lacks."""
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag in FLAGS + NOT_YET:
        assert f"--{flag.name}" in text
        assert flag.variable in text
    assert text.count("not available in this version") == len(NOT_YET)


@pytest.mark.parametrize("flag", FLAGS + NOT_YET, ids=lambda flag: flag.name)
def test_the_guide_for_operators_has_every_flag(flag: config.Flag) -> None:
    """Whoever runs the service finds what a flag is for, and how to choose its value."""
    assert re.search(rf"`--{flag.name}[` ]", OPERATIONS.read_text())


# Who can reach the port


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Flags with a file each; what is in them is for later."""
    pairs = {}
    for name in ("tls-cert", "tls-key", "tls-client-ca", "auth-tokens"):
        path = tmp_path / name
        path.write_text("x")
        pairs[name] = (f"--{name}", str(path))
    return pairs


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_a_loopback_address_needs_no_flag(host: str) -> None:
    """Nobody else can reach it; nor does AdminService need more there."""
    assert parsed("--host", host).is_local
    assert parsed("--host", host, "--enable-admin", "--enable-channelz").enable_admin


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "example.test", "localhost.test", "127.1"]
)
def test_the_network_needs_tls_or_a_flag_that_names_the_risk(host: str, secrets: dict[str, tuple[str, str]]) -> None:
    """Refused otherwise, with the flags that help; tokens do not make up for it."""
    for more in ((), secrets["auth-tokens"]):
        with pytest.raises(ConfigurationError, match="--tls-cert and --tls-key, or --allow-plaintext-network"):
            parsed("--host", host, *more)
    assert not parsed("--host", host, *secrets["tls-cert"], *secrets["tls-key"]).is_local
    assert parsed("--host", host, "--allow-plaintext-network").allow_plaintext_network
    assert parsed("--host", host, EMBERLINE_ALLOW_PLAINTEXT_NETWORK="1").allow_plaintext_network


def test_admin_is_never_open_to_every_caller_of_the_network(secrets: dict[str, tuple[str, str]]) -> None:
    """TLS alone does not say who calls, and a certificate that opens inference is none of an administrator's: tokens
    are asked for, or the names of administrators' certificates. The same for channelz.
    """
    tls = (*secrets["tls-cert"], *secrets["tls-key"])
    mutual = (*tls, *secrets["tls-client-ca"])
    network = ("--host", "0.0.0.0")
    for flag in ("--enable-admin", "--enable-channelz"):
        for door in (("--allow-plaintext-network",), tls, mutual):
            with pytest.raises(ConfigurationError, match=f"{flag} on --host 0.0.0.0 would be open to every caller"):
                parsed(*network, *door, flag)
        parsed(*network, *tls, *secrets["auth-tokens"], flag)
        assert parsed(*network, *mutual, "--admin-clients", "ops, chief", flag).admin_clients == ("ops", "chief")
    with pytest.raises(ConfigurationError, match="--admin-clients needs --tls-client-ca"):
        parsed(*network, *tls, "--admin-clients", "ops", "--enable-admin")
    with pytest.raises(ConfigurationError, match="--admin-clients does nothing"):
        parsed(*network, *mutual, "--admin-clients", "ops")


def test_tls_flags_belong_together(secrets: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    """One without the other is refused, as is a file that is not there or cannot be read."""
    for alone in ("tls-cert", "tls-key"):
        with pytest.raises(ConfigurationError, match="--tls-cert and --tls-key belong together"):
            parsed(*secrets[alone])
    with pytest.raises(ConfigurationError, match="--tls-client-ca needs --tls-cert"):
        parsed(*secrets["tls-client-ca"])
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigurationError, match="--auth-tokens must be a file"):
            parsed("--auth-tokens", str(missing))


def test_health_has_a_port_of_its_own() -> None:
    """Another than the main one, unless both are free ones."""
    assert parsed().health_port is None
    assert parsed("--health-port", "0", "--port", "0").health_port == 0
    with pytest.raises(ConfigurationError, match="--health-port and --port are both 7"):
        parsed("--health-port", "7", "--port", "7")


def test_a_model_name_is_one_that_a_request_may_send() -> None:
    """Requests have a bound for it."""
    assert len(parsed("--served-model-name", "n" * config.MODEL_NAME_BYTES_MAX).served_model_name) == 256
    with pytest.raises(ConfigurationError, match="--served-model-name must be at most 256 bytes"):
        parsed("--served-model-name", "n" * (config.MODEL_NAME_BYTES_MAX + 1))
