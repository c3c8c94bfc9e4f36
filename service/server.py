"""The composition root: build the parts, start, serve, drain, give up.

What lives here: the order in which things begin and end, and what each port offers. What must not: the rpc bodies, the
engine's life. The ports are bound before anything loads, so a conflict fails at once; calls meanwhile are told
ENGINE_STARTING. `stopping` is known everywhere before anything is torn down, and the listener closes with the process,
so that probes on new connections are told NOT_SERVING, not refused, and no call is told CANCELLED: gRPC's own stop does
that to those that come in its moment, and no client retries it. A call cut off by the process's end is UNAVAILABLE.

    bind ─► listen ─► start engines + load tokenizer ─► serve ─┬─► drain (SIGTERM, SIGINT) ─► exit 0
                                                               └─► give up (no engine any more) ─► exit 4 (3, 2 at the
                                                                   first start)
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2  # type: ignore[import-untyped] # it has no stubs
from grpc_channelz.v1._async import ChannelzServicer  # type: ignore[import-untyped] # as above
from grpc_health.v1 import health_pb2

from emberline.v1 import admin_pb2, inference_pb2, info_pb2, tokenizer_pb2
from scheduler import logs
from scheduler.errors import ConfigurationError, StartupError
from scheduler.messages import Ready
from service.admin import AdminServicer
from service.admission import Admission
from service.auth import AdminCertificates, TokenAuth
from service.backend import Backend
from service.blame import Blame
from service.config import ServerConfig
from service.death import Death
from service.devices import device_indices, num_gpus, threads_per_engine
from service.dispatch import Dispatcher
from service.engine import EngineSettings
from service.engine_process import ENGINE_COMMAND
from service.errors import DrainingError, QueueFullError
from service.exit import ExitCode, write_termination_log
from service.guide_child import GUIDE_COMMAND, GuideChild
from service.guide_compiler import GuideCompiler
from service.health import ADMIN_NAME, INFO_NAME, TOKENIZER_NAME, HealthServicer
from service.info import InfoServicer
from service.journal import Journal
from service.limits import (
    LIVE_CALLS_PER_SEQ_MAX,
    METADATA_BYTES_MAX,
    PENDING_CALLS_MAX,
    STREAMS_PER_CONNECTION_MAX,
    WORKER_BYTES_MAX,
)
from service.listener import Listener
from service.observation import Observation
from service.reflection import reflection_handlers
from service.reloading import Polled, keep_fresh
from service.replica import Replica
from service.request import SEQUENCES_MAX, Limits
from service.router import Router
from service.servicer import InferenceServicer, TokenizerServicer
from service.status import safe_handlers
from service.stream import RequestStream
from service.supervisor import DRAINING_RETRY_AFTER_S, Supervisor
from service.tls import Tls, TlsFiles
from service.tls import describe as describe_tls
from service.tokenizer import Tokenizer, load_tokenizer
from service.workers import Workers

PROMPT_THREADS = 2
TOOL_THREADS = 1
TRAILERS_TIMEOUT_S = 1.5
"""From a death on: how long the streams' ends may take to be sent before the process leaves."""
AFTER_GRACE_TIMEOUT_S = 1.0
LAST_CALLS_TIMEOUT_S = 0.25
"""For the ends of the last calls to be sent; a client that does not read them must not hold the process."""


class Server:
    """One server process. `run` is its whole life."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        load: Callable[[str, str | None], Tokenizer] = load_tokenizer,
    ) -> None:
        self._config = config
        self._engine_command = engine_command
        self._load = load
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._started_s = time.monotonic()
        self._has_served = False
        self._is_hopeless = False
        self._hopeless_since_s = 0.0
        self.address = ""
        """Where it listens, once bound."""
        self.health_address: str | None = None
        """Where health alone is told, once bound."""
        self._is_deaf = False
        """A port is lost for good."""
        self._num_stop_signals = 0
        self._drain_until_s = math.inf
        """When what lives is cut: once draining, what is left of the grace can only become less."""
        self._drain_changed = asyncio.Event()

    async def run(self) -> ExitCode:
        """Serve until told to stop or unable to go on. From the main thread.

        On return all calls have their answers and nothing but the listener is left, which goes with the process.
        """
        asyncio.get_running_loop().set_exception_handler(_report_loop_error)
        try:
            self._build()
            self._bind()
            _make_crash_dir(self._config.crash_dir)
        except (ConfigurationError, StartupError) as error:
            return self._could_not_start(error)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.request_stop)
        for listener in self._listeners:
            await listener.start()
        renewing = asyncio.create_task(keep_fresh(self._renewed))
        try:
            return await self._live()
        finally:
            renewing.cancel()
            self._supervisor.kill()
            self._backend.prompt_workers.shutdown()
            self._backend.tool_workers.shutdown()
            self._guides.close()

    async def close(self) -> None:
        """Close the listeners, too: for a process that outlives its server."""
        for listener in self._listeners:
            await listener.close()
        self._observation.shut()

    def request_stop(self) -> None:
        """What a stop signal does: the first drains, the second does not wait."""
        self._num_stop_signals += 1
        if self._num_stop_signals > 1:
            self._stop_now.set()
        self.drain(None)

    def drain(self, grace_s: float | None) -> int:
        """Take no new requests, and end once those that live have ended, or `grace_s` (None: the configured grace) is
        over. Again: the earlier end counts. Returns how many live.
        """
        grace_s = self._config.drain_grace_s if grace_s is None else grace_s
        self._drain_until_s = min(self._drain_until_s, time.monotonic() + grace_s)
        self._drain_changed.set()
        if not self._stop_requested.is_set() and not self._is_hopeless:
            self._shut_door()
        self._stop_requested.set()
        return self._admission.num_live

    # Building

    def _build(self) -> None:
        config = self._config
        self._journal = Journal()
        self._observation = Observation(config)
        totals, metrics = self._observation.totals, self._observation.metrics
        gpus = num_gpus()
        settings = EngineSettings(
            command=self._engine_command,
            num_threads=threads_per_engine(config.threads, config.device, config.replicas, gpus),
            step_deadline_s=config.step_deadline_s,
            crash_dir=config.crash_dir,
            model=config.served_model_name,
            metrics=metrics,
        )
        self._supervisor = Supervisor(
            replace(config.engine_config(), num_threads=settings.num_threads),
            self,
            settings,
            max_restarts=config.max_engine_restarts,
            device_indices=device_indices(config.device, config.replicas, gpus),
            keeps_standby=config.standby > 0,
        )
        self._admission = Admission(
            max_queue_requests=config.max_queue_requests,
            max_queue_tokens=config.max_queue_tokens,
            max_live_requests=config.max_queue_requests + LIVE_CALLS_PER_SEQ_MAX * config.max_num_seqs,
            num_slots=config.max_num_seqs * config.replicas,
            clock=time.monotonic,
            make_refusal=self._supervisor.refusal,
        )
        blame = Blame(time.monotonic, secrets.token_bytes(32))
        self._dispatcher = Dispatcher(
            self._journal,
            self._supervisor,
            blame,
            Router(config.replicas),
            stream_buffer_tokens=config.stream_buffer_tokens,
            totals=totals,
            metrics=metrics,
        )
        self._guides = GuideCompiler(
            partial(GuideChild, GUIDE_COMMAND),
            timeout_s=config.guide_compile_timeout_s,
            clock=time.monotonic,
            salt=secrets.token_bytes(32),
            make_refusal=lambda: QueueFullError(self._admission.retry_after_s()),
        )
        self._backend = Backend(
            config,
            self._admission,
            self._journal,
            self._supervisor,
            self._dispatcher,
            totals,
            self._observation.watch(self._supervisor, self._admission, self._dispatcher),
            self._guides,
            prompt_workers=self._workers("prompts", PROMPT_THREADS),
            tool_workers=self._workers("tools", TOOL_THREADS),
        )
        self._health = HealthServicer()
        self._health.set_offered(INFO_NAME, serving=True)
        self._health.set_offered(TOKENIZER_NAME, serving=False)
        if config.enable_admin:
            self._health.set_offered(ADMIN_NAME, serving=True)
        self._info = InfoServicer(self._backend)
        self._admin = AdminServicer(self._backend, self.drain)
        self._calls = _LiveCalls()
        self._secure()
        make_credentials = None if self._tls is None else self._tls.credentials
        self._listeners = [Listener(config.host, config.port, self._new_server, make_credentials)]
        if config.health_port is not None:
            self._listeners.append(Listener(config.host, config.health_port, self._new_health_server))

    def _secure(self) -> None:
        """Certificates and tokens. Raises ConfigurationError."""
        config = self._config
        self._tls: Tls | None = None
        self._interceptors: list[grpc.aio.ServerInterceptor] = [self._calls]
        self._renewed: list[Polled] = []
        if config.tls_cert is not None and config.tls_key is not None:
            self._tls = Tls(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))
            self._renewed.append(self._tls)
        if config.auth_tokens is not None:
            auth = TokenAuth(config.auth_tokens)
            if (config.enable_admin or config.enable_channelz) and not auth.has_scope("admin"):
                raise ConfigurationError("--auth-tokens: none of them has the scope admin, so that nobody could use it")
            self._interceptors.append(auth)
            self._renewed.append(auth)
        if config.admin_clients:
            self._interceptors.append(AdminCertificates(config.admin_clients))

    def _new_server(self) -> grpc.aio.Server:
        """What the main port offers."""
        server = grpc.aio.server(interceptors=self._interceptors, options=_grpc_options(self._config))
        services: list[tuple[ServiceDescriptor, object]] = [
            (inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], InferenceServicer(self._backend)),
            (tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"], TokenizerServicer(self._backend)),
            (info_pb2.DESCRIPTOR.services_by_name["InfoService"], self._info),
            (health_pb2.DESCRIPTOR.services_by_name["Health"], self._health),
        ]
        if self._config.enable_admin:
            services.append((admin_pb2.DESCRIPTOR.services_by_name["AdminService"], self._admin))
        if self._config.enable_channelz:
            services.append((channelz_pb2.DESCRIPTOR.services_by_name["Channelz"], ChannelzServicer()))
        for service, servicer in services:
            # A Watch may stall for as long as its caller likes: it holds nothing.
            timeout_s = None if servicer is self._health else self._config.reader_timeout_s
            check_room = servicer.check_room if isinstance(servicer, InferenceServicer) else None
            handlers = safe_handlers(service, servicer, _report_bug, reader_timeout_s=timeout_s, check_room=check_room)
            server.add_generic_rpc_handlers((handlers,))
        names = [service.full_name for service, _ in services]
        server.add_generic_rpc_handlers(reflection_handlers(names, _report_bug))
        return server

    def _new_health_server(self) -> grpc.aio.Server:
        """What the health port offers: the same health, and nothing else."""
        server = grpc.aio.server(interceptors=[self._calls], options=_HEALTH_OPTIONS)
        service = health_pb2.DESCRIPTOR.services_by_name["Health"]
        server.add_generic_rpc_handlers((safe_handlers(service, self._health, _report_bug),))
        return server

    def _workers(self, name: str, num_threads: int) -> Workers:
        return Workers(
            name,
            num_threads=num_threads,
            max_jobs=self._config.max_queue_requests,
            max_bytes=WORKER_BYTES_MAX,
            make_refusal=lambda: QueueFullError(self._admission.retry_after_s()),
        )

    def _bind(self) -> None:
        for listener in self._listeners:
            listener.bind()
        main, *others = self._listeners
        self.health_address = others[0].address if others else None
        self.address = main.address
        self._observation.bind()

    # Living

    async def _live(self) -> ExitCode:
        try:
            loading = asyncio.create_task(self._load_tokenizer())
            try:
                await self._supervisor.start()
            except OSError as error:
                raise StartupError(f"cannot start the engine process: {error.strerror}") from None
            stop = asyncio.create_task(self._stop_requested.wait())
            listening = {listener.lost(): listener for listener in self._listeners}
            waiting: set[asyncio.Future[Any]] = {stop, self._supervisor.gave_up, loading}
            while not (stop.done() or self._supervisor.gave_up.done() or self._is_deaf):
                await asyncio.wait({*waiting, *listening}, return_when=asyncio.FIRST_COMPLETED)
                for lost in [lost for lost in listening if lost.done()]:
                    listener = listening.pop(lost)
                    await self._listen_again(listener, lost)
                    listening[listener.lost()] = listener
                if loading.done() and loading in waiting:
                    waiting.discard(loading)
                    loading.result()  # raises what loading raised
        except (ConfigurationError, StartupError) as error:
            return await self._leave(self._could_not_start(error))
        stop.cancel()
        if not self._is_hopeless:
            code = await self._drain()
            if not self._is_hopeless:
                return await self._leave(ExitCode.BUG if self._is_deaf else code)
        return await self._leave(await self._give_up())

    async def _listen_again(self, listener: Listener, lost: asyncio.Future[bool]) -> None:
        """If the port cannot be had again, the process drains and ends with status 1, for whoever supervises it to
        start another.
        """
        if not await listener.listen_again(lost):
            self._health.set_alive(False)
            self._is_deaf = True

    async def _load_tokenizer(self) -> None:
        def load() -> Tokenizer:
            return self._load(self._config.model, self._config.revision)

        self._backend.tokenizer = await self._backend.tool_workers.run(load)
        self._serve_if_complete()

    def _serve_if_complete(self) -> None:
        """Open the door once both the tokenizer and the engine are there."""
        ready, tokenizer = self._supervisor.ready, self._backend.tokenizer
        if tokenizer is None:
            return
        self._backend.limits = _limits(self._config, tokenizer, ready)
        self._health.set_offered(TOKENIZER_NAME, serving=True)
        if ready is None:
            return
        self._backend.eos_token_ids = _eos_token_ids(tokenizer, ready)
        self._guides.configure(
            model=self._config.model,
            revision=self._config.revision,
            vocab_size=ready.vocab_size,
            eos_token_ids=self._backend.eos_token_ids,
        )
        self._update_door()
        if self._has_served or not self._supervisor.is_serving or self._stop_requested.is_set():
            return
        self._has_served = True
        logs.get_logger().info(
            "serving",
            address=self.address,
            health_address=self.health_address,
            metrics_address=self._observation.metrics_address,
            tls=describe_tls(self._tls),
            auth="off" if self._config.auth_tokens is None else "tokens",
            admin=self._config.enable_admin,
            model=self._config.served_model_name,
            model_type=ready.model_type,
            device=ready.device,
            dtype=ready.dtype,
            attention_backend=ready.attention_backend,
            max_model_len=ready.max_model_len,
            num_kv_blocks=ready.num_kv_blocks,
            block_size=ready.block_size,
            replicas=self._config.replicas,
            engine_pid=ready.pid,
            startup_s=round(time.monotonic() - self._started_s, 2),
        )

    def _update_door(self) -> None:
        """Health and admission say the same, in the same moment."""
        if self._stop_requested.is_set():
            return  # draining says its own
        is_serving = self._supervisor.is_serving and self._backend.tokenizer is not None
        if is_serving:
            self._admission.open()
        else:
            self._admission.shut(self._supervisor.refusal)
        self._health.set_serving(is_serving)

    def on_replica_ready(self, replica: Replica, _ready: Ready) -> None:
        """The supervisor's word."""
        self._observation.totals.num_restarts += replica.num_deaths > 0
        self._serve_if_complete()
        self._dispatcher.on_replica_ready(replica)

    def on_replica_death(self, replica: Replica, death: Death) -> None:
        """The supervisor's word: from this moment on nobody is told otherwise."""
        self._observation.totals.num_deaths += 1
        self._update_door()
        self._dispatcher.on_replica_death(replica, death)

    def on_replica_stall(self, replica: Replica) -> None:
        """The supervisor's word."""
        self._dispatcher.on_replica_stall(replica)

    def on_replica_output(self, replica: Replica, stream: RequestStream, num_tokens: int) -> None:
        """The supervisor's word."""
        self._dispatcher.on_replica_output(replica, stream, num_tokens)

    def on_last_hope_lost(self) -> None:
        """The supervisor's word: this process cannot recover by itself."""
        self._is_hopeless = True
        self._admission.shut(self._supervisor.refusal)
        self._health.set_serving(False)
        self._health.set_alive(False)
        self._dispatcher.end_all(self._supervisor.refusal)
        self._hopeless_since_s = time.monotonic()

    # Ending

    def _shut_door(self) -> None:
        self._admission.shut(lambda: DrainingError(DRAINING_RETRY_AFTER_S))
        self._health.set_serving(False)

    async def _drain(self) -> ExitCode:
        self.drain(None if math.isinf(self._drain_until_s) else math.inf)  # nobody asked where a port is lost
        grace_s = round(self._drain_until_s - time.monotonic(), 1)
        logs.get_logger().info("draining", num_live=self._admission.num_live, grace_s=grace_s)
        while self._admission.num_live and not self._stop_now.is_set():
            left_s = self._drain_until_s - time.monotonic()
            if left_s <= 0:
                break
            self._drain_changed.clear()
            await self._wait_for_calls(left_s, unless=(self._stop_now, self._drain_changed))
        if not self._is_hopeless and self._admission.num_live:
            num_cut = self._dispatcher.end_all(lambda: DrainingError(DRAINING_RETRY_AFTER_S))
            logs.get_logger().warning("streams cut at the end of the grace", num_streams=num_cut)
            if not self._stop_now.is_set():
                await self._wait_for_calls(AFTER_GRACE_TIMEOUT_S)
        return ExitCode.CLEAN

    async def _give_up(self) -> ExitCode:
        """It is over and has been told; from here on a stop signal changes nothing."""
        end = await self._supervisor.gave_up
        elapsed_s = time.monotonic() - self._hopeless_since_s
        await self._wait_for_calls(max(TRAILERS_TIMEOUT_S - elapsed_s, 0))
        if end.is_first_start:
            make = ConfigurationError if end.is_configuration else StartupError
            return self._could_not_start(make(end.root_cause))
        logs.get_logger().error("gave up", reason=end.root_cause)
        write_termination_log(self._config.termination_log, end.root_cause)
        return ExitCode.GAVE_UP

    async def _leave(self, code: ExitCode) -> ExitCode:
        self._health.close()
        if self._stop_now.is_set():
            self._supervisor.kill()
        await self._supervisor.stop()
        await self._calls.wait(LAST_CALLS_TIMEOUT_S)
        if not self._stop_now.is_set():
            await self._observation.close()
        logs.get_logger().info("stopped", exit_code=int(code))
        return code

    def _could_not_start(self, error: Exception) -> ExitCode:
        if isinstance(error, ConfigurationError):
            logs.get_logger().error("configuration error", reason=str(error))
            return ExitCode.CONFIGURATION
        logs.get_logger().error("could not start", reason=str(error))
        write_termination_log(self._config.termination_log, str(error))
        return ExitCode.COULD_NOT_START

    async def _wait_for_calls(self, timeout_s: float, unless: Sequence[asyncio.Event] = ()) -> None:
        """Until no request is live, or the time is up, or one of the events is set."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._admission.idle, *unless)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


class _LiveCalls(grpc.aio.ServerInterceptor):
    """The tasks in which gRPC answers calls; each is over once its status is sent."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called in the call's own task."""
        task = asyncio.current_task()
        # A client's stream of questions about the protocol stays open as long as the client likes.
        if task is not None and not handler_call_details.method.startswith("/grpc.reflection."):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def wait(self, timeout_s: float) -> None:
        """Until the calls of this moment are over; those that come later are not waited for."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)


def _limits(config: ServerConfig, tokenizer: Tokenizer, ready: Ready | None) -> Limits:
    """What requests are held to; without an engine, as far as it is known (enough to tokenize)."""
    max_model_len = ready.max_model_len if ready is not None else config.max_model_len or config.context_tokens()
    max_prompt_tokens = min(config.max_prompt_tokens or max_model_len, max_model_len - 1)
    bytes_per_token = tokenizer.bytes_per_token_max
    return Limits(
        vocab_size=ready.vocab_size if ready is not None else tokenizer.vocab_size,
        max_model_len=max_model_len,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=min(config.max_output_tokens, max_model_len - 1),
        max_request_bytes=config.max_request_bytes(),
        max_text_bytes=None if bytes_per_token is None else bytes_per_token * max_prompt_tokens,
        max_sequences=min(SEQUENCES_MAX, config.max_num_seqs if ready is None else ready.max_num_seqs),
    )


def _eos_token_ids(tokenizer: Tokenizer, ready: Ready) -> tuple[int, ...]:
    """Those that the model can sample; its files may name others."""
    known = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < ready.vocab_size)
    if known != tokenizer.eos_token_ids:
        unknown = sorted(set(tokenizer.eos_token_ids) - set(known))
        logs.get_logger().warning("eos token ids beyond the vocabulary", ids=unknown, vocab_size=ready.vocab_size)
    return known


def _grpc_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # or two servers would silently share the port
        ("grpc.max_receive_message_length", config.max_request_bytes()),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_channelz", int(config.enable_channelz)),
        # A burst is answered QUEUE_FULL by us; gRPC's own bounds (1,000 and 3,000) would answer it CANCELLED.
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        # Clients may ping during a long silent prefill; clients that vanished are found.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


_HEALTH_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


def _make_crash_dir(path: Path) -> None:
    """Now, so that it is not only at a death that somebody hears of it. The server serves all the same."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logs.get_logger().warning("crash dir cannot be made", path=str(path), reason=error.strerror)


def _report_bug(incident_id: str, error: Exception) -> None:
    logs.get_logger().error("internal error", incident_id=incident_id, **logs.describe(error))


def _report_loop_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """`message` is fixed text of asyncio's own."""
    error = context.get("exception")
    described = logs.describe(error) if error is not None else {}
    # A path that is no UTF-8 ends gRPC's own loop, and its shutdown task with it: `listener lost` has told that. And
    # gRPC's poller is sometimes woken for bytes that it has taken already, which harms nobody.
    is_known = isinstance(error, UnicodeDecodeError) or (
        isinstance(error, BlockingIOError) and "PollerCompletionQueue" in str(context.get("message"))
    )
    log = logs.get_logger().debug if is_known else logs.get_logger().error
    log("internal error", message=context.get("message"), **described)
