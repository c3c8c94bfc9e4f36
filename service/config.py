"""What the server was asked to be: one frozen `ServerConfig`, checked once.

What lives here: every flag with its unit, default and check. What must not: I/O beyond asking whether a path exists.
A flag on the command line beats `EMBERLINE_<NAME>` in the environment, which beats the default. A flag whose feature
this version lacks is refused unless it has its neutral value: silence would be a lie.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scheduler.config import DEVICES, DTYPES, EngineConfig
from scheduler.errors import ConfigurationError, StartupError
from scheduler.logs import LEVELS, LogFormat, default_format

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
ENVIRONMENT_PREFIX = "EMBERLINE_"
REQUEST_BYTES_BASE = 4 * 1024 * 1024
REQUEST_BYTES_PER_TOKEN = 64
"""Far more than a token of text or of ids takes; what a longer prompt would need is over its limit in tokens anyway."""
CONTEXT_TOKENS_UNKNOWN = 128 * 1024
MODEL_NAME_BYTES_MAX = 256
_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The effective flags; `parse` makes it. Names are those of the flags, with units where the flag's text has one."""

    model: str
    served_model_name: str
    revision: str | None
    trust_remote_code: bool
    host: str
    port: int
    health_port: int | None
    allow_plaintext_network: bool
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    auth_tokens: Path | None
    enable_admin: bool
    admin_clients: tuple[str, ...]
    enable_channelz: bool
    metrics_port: int | None
    otlp_endpoint: str | None
    dtype: str
    device: str
    attention_backend: str
    threads: int | None
    max_model_len: int | None
    max_prompt_tokens: int | None
    max_output_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    num_kv_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    max_queue_requests: int
    max_queue_tokens: int
    stream_buffer_tokens: int
    reader_timeout_s: float
    replicas: int
    on_engine_death: str
    max_engine_restarts: int
    standby: int
    step_deadline_s: float
    guide_compile_timeout_s: float
    drain_grace_s: float
    log_format: LogFormat
    log_level: str
    termination_log: Path | None
    crash_dir: Path

    @property
    def is_local(self) -> bool:
        """Whether the port can be reached from this machine alone."""
        return is_loopback(self.host)

    def engine_config(self) -> EngineConfig:
        """The engine's share."""
        return EngineConfig(
            model=self.model,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.attention_backend,
            num_threads=self.threads,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )

    def max_request_bytes(self) -> int:
        """Largest request message: room for the largest legal prompt, and for options over the whole vocabulary."""
        context = self.max_prompt_tokens or self.max_model_len or self.context_tokens()
        return REQUEST_BYTES_BASE + REQUEST_BYTES_PER_TOKEN * context

    def context_tokens(self) -> int:
        """The model's own context, where its files tell before an engine does."""
        try:
            value = json.loads(Path(self.model, "config.json").read_text()).get("max_position_embeddings")
        except (OSError, ValueError, AttributeError):
            return CONTEXT_TOKENS_UNKNOWN
        return value if isinstance(value, int) and 1 < value < 2**24 else CONTEXT_TOKENS_UNKNOWN


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how its text becomes a value."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = "N"
    choices: tuple[str, ...] = ()
    field: str = ""
    """The field of `ServerConfig`, where it is not the flag's own name."""
    is_switch: bool = False

    @property
    def key(self) -> str:
        """The name as an identifier."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()


def _integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number, not {text!r}") from None
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}, not {value}")
        return value

    return parse


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"must be a number, not {text!r}") from None
        if not math.isfinite(value) or value > high or value < low or (above and value == low):
            raise ValueError(f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}, not {text}")
        return value

    return parse


def _size(text: str) -> int:
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _SIZE_UNITS else ""
    try:
        value = float(number.removesuffix(unit)) * _SIZE_UNITS[unit]
    except ValueError:
        raise ValueError(f"must be a size such as 512M or 2GiB, not {text!r}") from None
    if not 2**20 <= value < 2**63:
        raise ValueError(f"must be at least 1MiB, not {text!r}")
    return int(value)


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"must be true or false, not {text!r}")


def _text(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("must be a printable, non-empty text")
    return text


def _model_name(text: str) -> str:
    if len(_text(text).encode()) > MODEL_NAME_BYTES_MAX:
        raise ValueError(f"must be at most {MODEL_NAME_BYTES_MAX} bytes")
    return text


def _model(text: str) -> str:
    path = Path(_text(text)).expanduser()
    if path.is_dir():
        return str(path)
    looks_like_path = text.startswith(("/", ".", "~")) or text.count("/") > 1
    if looks_like_path:
        raise ValueError(f"no such directory: {text}")
    return text


def _host(text: str) -> str:
    host = text.removeprefix("[").removesuffix("]")
    if ":" in host:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"must be a host name or an address without a port, not {text!r}") from None
    return _text(host)


def is_loopback(host: str) -> bool:
    """Of names only `localhost` is known to be; another one may mean any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _otlp_endpoint(text: str) -> str:
    url = urlsplit(_text(text))
    if "@" in text:
        raise ValueError("must be a URL without credentials: OTEL_EXPORTER_OTLP_HEADERS is for these")
    if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
        raise ValueError(f"must be a URL such as http://127.0.0.1:4317 (https for TLS), without a path, not {text!r}")
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(_text(name.strip()) for name in text.split(","))
    if len(set(names)) < len(names):
        raise ValueError("must be names that differ, joined by commas")
    return names


def _readable_file(text: str) -> Path:
    path = Path(_text(text)).expanduser()
    if not path.is_file():
        raise ValueError(f"must be a file, not {text!r}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"cannot be read: {text}")
    return path


def _path(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"must be a file in a directory that exists, not {text!r}")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise ValueError(f"cannot be written: {text}")
    return path


def _directory(text: str) -> Path:
    path = Path(_text(text)).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError(f"must be a directory, not {text!r}")
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot be written: {text}")
    return path


FLAGS = (
    Flag("model", _model, None, "directory or hub name that transformers can load (default: the small model that "
         "scripts/install fetches)", "DIR|NAME"),
    Flag("served-model-name", _model_name, None, "name that requests use (default: the last part of --model)", "NAME"),
    Flag("revision", _text, None, "revision of a hub model (default: its main branch)", "REV"),
    Flag("trust-remote-code", _switch, False, "run Python code that comes with the model", is_switch=True),
    Flag("host", _host, "127.0.0.1", "address to listen on", "HOST"),
    Flag("port", _integer(0, 65535), 50051, "port to listen on; 0 picks a free one", "PORT"),
    Flag("health-port", _integer(0, 65535), None, "port for health alone, in plaintext and open to all, on the same "
         "host: for probes that have neither certificates nor tokens; 0 picks a free one", "PORT"),
    Flag("tls-cert", _readable_file, None, "certificate chain in PEM, the server's own first; read again when it "
         "changes", "FILE"),
    Flag("tls-key", _readable_file, None, "its private key in PEM, not encrypted", "FILE"),
    Flag("tls-client-ca", _readable_file, None, "authorities in PEM; callers then need a certificate of theirs",
         "FILE"),
    Flag("allow-plaintext-network", _switch, False, "listen on an address that others can reach without TLS: whoever "
         "is on the way reads and changes prompts, answers and tokens", is_switch=True),
    Flag("auth-tokens", _readable_file, None, "file of bearer tokens: a name, scopes (inference, info, admin) and the "
         "token's SHA-256 per line; read again when it changes", "FILE"),
    Flag("enable-admin", _switch, False, "offer AdminService (Abort, Drain) to tokens with the scope admin, to the "
         "certificates of --admin-clients, or on a loopback address to whoever is there", is_switch=True),
    Flag("admin-clients", _names, (), "common or alternative names of the client certificates that may call "
         "AdminService", "NAMES"),
    Flag("enable-channelz", _switch, False, "offer gRPC's channelz (connections, their peers and counts), to those who "
         "may call AdminService", is_switch=True),
    Flag("metrics-port", _integer(0, 65535), None, "port for Prometheus, on the same host: plain HTTP at /metrics, "
         "open to all; 0 picks a free one (default: none)", "PORT"),
    Flag("otlp-endpoint", _otlp_endpoint, None, "collector that gets a trace of each call, by OTLP over gRPC, such as "
         "http://127.0.0.1:4317; OTEL_* variables refine it (default: no traces)", "URL"),
    Flag("dtype", _text, "auto", "precision; auto is float32 on a CPU, on a GPU the checkpoint's own 16-bit type or "
         "bfloat16", "TYPE", DTYPES),
    Flag("device", _text, "auto", "auto takes a GPU where there is one", "DEVICE", DEVICES),
    Flag("attention-backend", _text, "auto", "auto fits the device", "NAME", ("auto", "flash", "cpu", "reference")),
    Flag("threads", _integer(1, 1024), None, "compute threads of each engine (default: one per usable core, "
         "shared out among --replicas)"),
    Flag("max-model-len", _integer(2), None, "tokens of prompt and output together (default: the model's own limit)"),
    Flag("max-prompt-tokens", _integer(1), None, "tokens of a prompt (default: --max-model-len less one)"),
    Flag("max-output-tokens", _integer(1), 2048, "tokens of an output, and what absent max_tokens means"),
    Flag("max-num-seqs", _integer(1, 4096), 64, "sequences in one step"),
    Flag("max-num-batched-tokens", _integer(1, 2**20), 512, "tokens in one step; at least --max-num-seqs"),
    Flag("block-size", _integer(1, 4096), None, "tokens per KV block (default: the attention backend's choice)"),
    Flag("num-kv-blocks", _integer(1), None, "KV blocks in the pool (default: as many as memory allows)"),
    Flag("kv-cache-memory", _size, None, "memory of the KV pool, such as 512M or 2GiB (default: measured)", "SIZE",
         field="kv_cache_memory_bytes"),
    Flag("gpu-memory-utilization", _number(0, 1, above=True), 0.9, "share of the GPU's memory to use", "SHARE"),
    Flag("max-queue-requests", _integer(1, 10**6), 1024, "requests that may wait for their first token; more are "
         "told QUEUE_FULL"),
    Flag("max-queue-tokens", _integer(1, 10**9), 1_000_000, "prompt tokens, and entries of long options, that may "
         "wait for a first token"),
    Flag("stream-buffer-tokens", _integer(1, 2**20), 64, "tokens of a sequence that may wait for a reader that is "
         "behind; at the bound it gets no more steps until the reader has taken them"),
    Flag("reader-timeout", _number(0.1, 86400), 30.0, "seconds for which a reader may leave no room for the next "
         "message; then its stream ends with SLOW_READER", "SECONDS", field="reader_timeout_s"),
    Flag("replicas", _integer(1, 64), 1, "engines in this server: one per GPU, or sharing the cores"),
    Flag("on-engine-death", _text, "fail", "fail ends an engine's streams UNAVAILABLE; replay lets them go on where "
         "they were, on another engine or the next one", "WHAT", ("fail", "replay")),
    Flag("max-engine-restarts", _integer(0, 1000), 5, "engine deaths within five minutes after which the server gives "
         "up, unless another replica serves; 0 gives up at the first"),
    Flag("standby", _integer(0, 1), 0, "1 keeps a warm second engine, which takes over from a dead one in a second or "
         "two; it takes memory, and its own loading some of the cores", "0|1"),
    Flag("step-deadline", _number(0.1, 3600), 10.0, "seconds, beside what its work takes, after which a step without "
         "progress is a dead engine", "SECONDS", field="step_deadline_s"),
    Flag("guide-compile-timeout", _number(0.05, 60), 2.0, "seconds of CPU time that compiling one guide (a JSON "
         "schema, a regular expression, a grammar) may take", "SECONDS", field="guide_compile_timeout_s"),
    Flag("drain-grace", _number(0, 86400), 30.0, "seconds that live streams get after SIGTERM", "SECONDS",
         field="drain_grace_s"),
    Flag("log-format", _text, None, "default: console where stderr is a terminal, else json", "FORMAT",
         ("json", "console")),
    Flag("log-level", _text, "info", "what is below is not logged", "LEVEL", tuple(LEVELS)),
    Flag("termination-log", _path, None, "file that gets the root cause when the exit code is 3 or 4", "FILE"),
    Flag("crash-dir", _directory, None, "where each engine death leaves a report for `emberline autopsy` (default: "
         "crashes/ in the cache directory)", "DIR"),
)  # fmt: skip

NOT_YET = (Flag("quantization", str, "none", "weights in fewer bits", "NAME"),)
"""Flags of later versions, each refused unless it has the value that changes nothing."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every flag; values stay text until `parse`, so that flag and environment are checked alike."""
    for flag in FLAGS + NOT_YET:
        note = f" [{'|'.join(flag.choices)}]" if flag.choices else ""
        if flag.default not in (None, False, ()):
            note += f" (default: {flag.default})"
        if flag in NOT_YET:
            note += " (not available in this version)"
        help_text = f"{flag.help}{note}; {flag.variable}".replace("%", "%%")
        if flag.is_switch:
            parser.add_argument(f"--{flag.name}", action="store_const", const="true", help=help_text)
        else:
            parser.add_argument(f"--{flag.name}", metavar=flag.metavar, help=help_text)


def parse(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ServerConfig:
    """The effective configuration.

    Raises:
        ConfigurationError: a value is out of range, or flags contradict each other; names the flag or the variable.
        StartupError: no model was asked for and the default one is not installed.
    """
    for flag in NOT_YET:
        source, text = _given(flag, arguments, environ)
        if text is not None and _value(flag, source, text) != flag.default:
            raise ConfigurationError(f"{source}={text}: not available in this version")
    values: dict[str, Any] = {}
    for flag in FLAGS:
        source, text = _given(flag, arguments, environ)
        values[flag.field or flag.key] = flag.default if text is None else _value(flag, source, text)
    if values["model"] is None:
        values["model"] = _default_model(environ)
    values["served_model_name"] = values["served_model_name"] or Path(values["model"]).name
    values["log_format"] = values["log_format"] or default_format()
    values["crash_dir"] = values["crash_dir"] or _cache(environ) / "crashes"
    config = ServerConfig(**{field.name: values[field.name] for field in fields(ServerConfig)})
    _check_together(config)
    return config


def _given(flag: Flag, arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, str | None]:
    text = getattr(arguments, flag.key)
    if text is not None:
        return f"--{flag.name}", text
    return flag.variable, environ.get(flag.variable) or None  # empty: what a manifest writes for "not set"


def _value(flag: Flag, source: str, text: str) -> Any:
    if flag.choices and text not in flag.choices:
        raise ConfigurationError(f"{source} must be one of {', '.join(flag.choices)}, not {text!r}")
    try:
        return flag.parse(text)
    except ValueError as error:
        hint = ""
        if source == "EMBERLINE_PORT" and text.startswith("tcp://"):
            hint = " (Kubernetes sets this for a Service called emberline: set enableServiceLinks: false)"
        raise ConfigurationError(f"{source} {error}{hint}") from None
    except (OSError, RuntimeError) as error:  # a path that may not be looked at, or of a user that there is not
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(f"{source} cannot be used: {reason}") from None


def _cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("EMBERLINE_CACHE") or "~/.cache/emberline").expanduser()


def _default_model(environ: Mapping[str, str]) -> str:
    path = _cache(environ) / "models" / DEFAULT_MODEL_NAME
    if not (path / "config.json").is_file():
        raise StartupError(
            f"the default model is not in {path}: run scripts/install in a clone of Emberline, or give --model"
        )
    return str(path)


def _check_together(config: ServerConfig) -> None:
    def refuse(why: str) -> None:
        raise ConfigurationError(why)

    if config.max_num_batched_tokens < config.max_num_seqs:
        refuse(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}): each running sequence takes one token of a step"
        )
    if config.max_model_len and config.max_prompt_tokens and config.max_prompt_tokens >= config.max_model_len:
        refuse(
            f"--max-prompt-tokens ({config.max_prompt_tokens}) must be below --max-model-len ({config.max_model_len}):"
            " a request has at least one output token"
        )
    if config.num_kv_blocks and config.kv_cache_memory_bytes:
        refuse("--num-kv-blocks and --kv-cache-memory both size the KV pool: give one")
    _check_doors(config, refuse)


def _check_doors(config: ServerConfig, refuse: Callable[[str], None]) -> None:
    """Who can reach the port, and what for. What is in the tokens' file is `server.py`'s to check."""
    if (config.tls_cert is None) != (config.tls_key is None):
        refuse("--tls-cert and --tls-key belong together")
    if config.tls_client_ca is not None and config.tls_cert is None:
        refuse("--tls-client-ca needs --tls-cert and --tls-key: without TLS there are no client certificates")
    if config.tls_cert is None and not (config.is_local or config.allow_plaintext_network):
        refuse(
            f"--host {config.host} can be reached by others, and without TLS they can read along: give --tls-cert and "
            "--tls-key, or --allow-plaintext-network if the network is to be trusted with prompts, answers and tokens"
        )
    if config.admin_clients and config.tls_client_ca is None:
        refuse("--admin-clients needs --tls-client-ca: names are those of verified certificates")
    for_administrators = [
        flag
        for flag, is_on in (("--enable-admin", config.enable_admin), ("--enable-channelz", config.enable_channelz))
        if is_on
    ]
    if config.admin_clients and not for_administrators:
        refuse("--admin-clients does nothing without --enable-admin or --enable-channelz")
    if for_administrators and not (config.is_local or config.auth_tokens or config.admin_clients):
        refuse(
            f"{for_administrators[0]} on --host {config.host} would be open to every caller: give --auth-tokens with "
            "an admin token, or --tls-client-ca with --admin-clients"
        )
    if config.health_port and config.health_port == config.port:
        refuse(f"--health-port and --port are both {config.port}: they are two ports")
    if config.metrics_port and config.metrics_port in (config.port, config.health_port):
        refuse(f"--metrics-port is {config.metrics_port}, as another of the ports is")


def termination_log(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    """The termination log alone, for a start that fails before there is a `ServerConfig`."""
    (flag,) = (flag for flag in FLAGS if flag.key == "termination_log")
    source, text = _given(flag, arguments, environ)
    return None if text is None else _value(flag, source, text)
