"""The engine process: `python -m scheduler.engine.process --socket-fd N --flight-recorder-fd M --stacks-fd L`.

What lives here: the edges of the process (descriptors, signals, limits, the parent's death) and the fatal boundary:
whatever exception ends the loop, or any helper thread, is reported once as `EngineFailed` and ends the process. The
front end logs it; here it is not logged, so that a death has one record. Other records go to stderr as JSON lines,
which the front end takes into its own log.

The life of an engine: import everything, read `EngineConfig`, load (telling progress), say `Ready`, then step until
`Shutdown` (exit status 0) or until the front end is gone. The imports take longer than all the rest, so a process that
is kept without a configuration, as a spare, has them behind it; it has no thread pools, which a configuration sizes,
and has not touched a GPU. With `EngineConfig.standby` the process loads what it may hold beside a serving engine, says
`StandingBy`, and finishes when `Activate` comes.

SIGUSR1 makes it write the Python stacks of all its threads to `--stacks-fd`, whatever it is doing: the signal's
handler is C code that needs neither the GIL nor the main thread's attention.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from scheduler import logs
from scheduler.config import EngineConfig
from scheduler.core.config import SchedulerConfig
from scheduler.engine.channel import Channel, FrontEndGoneError
from scheduler.engine.flight_recorder import FlightRecorder
from scheduler.flight_record import FlightWriter
from scheduler.messages import Activate, EngineFailed, LoadProgress, Phase, Ready, Shutdown, StandingBy

if TYPE_CHECKING:
    from scheduler.engine.engine_core import EngineCore

MESSAGE_BYTES_MAX = 2048
TRACEBACK_CHARS_MAX = 16 * 1024
LAST_WORDS_TIMEOUT_S = 1.0
LOG_FLUSH_TIMEOUT_S = 0.1
HELD_UP_POLL_S = 0.01
"""While a thread reads what the only requests need."""
STACKS_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


class _ToldToStopError(Exception):
    """A Shutdown came before this engine served."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one engine until it is told to stop, or fails."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="scheduler.engine.process")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--flight-recorder-fd", type=int, required=True)
    parser.add_argument("--stacks-fd", type=int)
    arguments = parser.parse_args(argv)

    _guard_process()
    if arguments.stacks_fd is not None:
        faulthandler.register(STACKS_SIGNAL, file=arguments.stacks_fd, all_threads=True)
    channel = Channel(socket.socket(fileno=arguments.socket_fd))
    recorder = FlightRecorder(
        FlightWriter(arguments.flight_recorder_fd), time.monotonic_ns, lambda: channel.num_messages_received
    )
    log_writer = logs.configure("json", "debug", process="engine")  # the front end knows the level
    boundary = _FatalBoundary(channel, recorder, log_writer)
    threading.excepthook = boundary.on_thread_exception
    try:
        recorder.enter(Phase.LOADING, 0)
        core, ready = _load(channel, recorder, started_s)
        boundary.starting = False
        channel.send(ready)
        _run(core, channel, recorder)
    except FrontEndGoneError:
        os._exit(0)
    except _ToldToStopError:
        pass
    except BaseException as error:  # noqa: BLE001 - the boundary is for whatever there is, SystemExit included
        boundary.fail(error)
    log_writer.close(LOG_FLUSH_TIMEOUT_S)
    os._exit(0)  # Shutdown: native thread pools have nothing to save, and their destructors can hang


def _guard_process() -> None:
    """No core dumps (they delay end-of-file and reaping), no outliving the parent, no share in its signals to stop."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The front end drains first and then says Shutdown. A terminal's Ctrl-C reaches process groups, and a service
    # manager's SIGTERM whole control groups: an engine that died of it would make a clean stop a death.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere end of file on the socket must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the line above sent no signal; its end of the socket is closed, and the first read of
    # the configuration finds that.


def _load(channel: Channel, recorder: FlightRecorder, started_s: float) -> tuple[EngineCore, Ready]:
    """Everything before READY, the waiting for the front end's word included."""
    begun_s = started_s  # when whoever waits for this engine began to wait

    def on_progress(stage: str) -> None:
        channel.send(LoadProgress(stage, time.monotonic() - begun_s))

    on_progress("imports")
    gc.disable()  # a collection walks all the modules made so far and finds nothing: a quarter of the imports' time
    # Only now: torch takes seconds to import, and whatever goes wrong in it must reach the fatal boundary.
    from scheduler.core.scheduler import Scheduler  # noqa: PLC0415 - see above
    from scheduler.engine.engine_core import EngineCore  # noqa: PLC0415 - see above
    from scheduler.model import startup  # noqa: PLC0415 - see above

    startup.import_ahead()
    gc.freeze()
    gc.enable()
    is_spare = not channel.has_message()
    config = _receive_config(channel)
    if is_spare:
        begun_s = time.monotonic()
    prepared = startup.prepare(config, on_progress)
    gc.collect()
    gc.freeze()  # what a model consists of lives as long as the process: no collection needs to walk it again
    device_index = config.device_index
    if config.standby:
        channel.send(StandingBy(os.getpid()))
        activation = _receive_activation(channel)
        begun_s = time.monotonic()
        on_progress("activation")  # a sign of life, before a large model's way to its device
        if activation.device_index is not None:
            device_index = activation.device_index
    runner = prepared.activate(device_index, on_progress)
    info = runner.info
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            num_kv_blocks=info.num_kv_blocks,
        )
    )
    core = EngineCore(scheduler, runner, channel.receive, recorder, time.monotonic)
    gc.freeze()
    ready = Ready(pid=os.getpid(), startup_s=time.monotonic() - begun_s, **dataclasses.asdict(info))
    return core, ready


def _receive_config(channel: Channel) -> EngineConfig:
    message = channel.next_message()
    match message:
        case EngineConfig():
            return message
        case Shutdown():
            raise _ToldToStopError
    raise TypeError(f"an engine's first message is its EngineConfig, not {type(message).__name__}")


def _receive_activation(channel: Channel) -> Activate:
    message = channel.next_message()
    match message:
        case Activate():
            return message
        case Shutdown():
            raise _ToldToStopError
    raise TypeError(f"a standby is not told {type(message).__name__}")


def _run(core: EngineCore, channel: Channel, recorder: FlightRecorder) -> None:
    while True:
        outputs = None if channel.is_congested else core.step()
        if core.is_shutting_down:
            return  # before any wait: nothing more will come to end it
        if outputs is not None:
            recorder.enter(Phase.SEND, recorder.step_id)
            channel.send(outputs)
        if not core.has_work or channel.is_congested:
            recorder.enter(Phase.IDLE, recorder.step_id)
            channel.wait(core.idle_timeout_s())
        elif core.is_held_up:
            recorder.enter(Phase.IDLE, recorder.step_id)
            channel.wait(HELD_UP_POLL_S)


class _FatalBoundary:
    """Turns the exception that ends this engine into its last message."""

    def __init__(self, channel: Channel, recorder: FlightRecorder, log_writer: logs.StderrWriter) -> None:
        self._channel = channel
        self._recorder = recorder
        self._log_writer = log_writer
        self._lock = threading.Lock()
        self.starting = True

    def on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """An engine with a dead helper is deaf or blind: it must not live on."""
        self.fail(args.exc_value or args.exc_type(), args.exc_traceback)

    def fail(self, error: BaseException, error_traceback: TracebackType | None = None) -> NoReturn:
        """Report `error` and end the process with status 1."""
        self._lock.acquire()  # the first failure is the cause; a later one waits here for the end
        shape = self._recorder.last_shape
        frames = traceback.format_exception(type(error), error, error_traceback or error.__traceback__)
        report = EngineFailed(
            exception_type=f"{type(error).__module__}.{type(error).__qualname__}",
            message=_cut_end(str(error)),
            traceback=_cut_middle("".join(frames)),
            phase=self._recorder.phase,
            step_id=self._recorder.step_id,
            batch="" if shape is None else str(shape),
            starting=self.starting,
        )
        self._channel.send_last_words(report, timeout_s=LAST_WORDS_TIMEOUT_S)
        self._log_writer.flush(LOG_FLUSH_TIMEOUT_S)
        os._exit(1)


def _cut_end(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MESSAGE_BYTES_MAX:
        return text
    return encoded[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore") + "…"


def _cut_middle(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS_MAX:
        return text
    half = TRACEBACK_CHARS_MAX // 2
    return f"{text[:half]}\n  … {len(text) - 2 * half} characters left out …\n{text[-half:]}"


if __name__ == "__main__":
    main(sys.argv[1:])
