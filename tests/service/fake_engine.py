"""An engine without a model, for the tests of the front end: a real process, the real codec, made-up tokens.

It answers each request with the ids of `tokens_of` (a function of the prompt alone), one token per step for all
running requests, or for one alone whose `alone_until` asks for it. A prompt that begins with an id of `Trigger` makes
it misbehave the moment the request is taken. Like the real one it can stand by, pauses requests, and fails one that it
was given too late a moment for.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import select
import signal
import socket
import sys
import time
import traceback
from array import array
from enum import IntEnum

from scheduler.codec import FrameDecoder, encode
from scheduler.config import EngineConfig
from scheduler.core.stopping import finish_reason_after
from scheduler.flight_record import FlightWriter, StepShape
from scheduler.messages import (
    Abort,
    Activate,
    EngineFailed,
    EngineStats,
    FailureKind,
    FinishReason,
    LoadProgress,
    Pause,
    Phase,
    PromptLogprobs,
    Ready,
    RequestFailure,
    SequenceOutput,
    SequenceStart,
    Shutdown,
    StandingBy,
    StepOutputs,
    Submit,
    Unpause,
)

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 4096
NUM_KV_BLOCKS = 64


class Trigger(IntEnum):
    """First id of a prompt → what happens."""

    EXIT_ZERO = 990
    SIGKILL = 991
    SIGSEGV = 992
    RAISE = 993
    HANG = 994
    GARBAGE = 995
    CLOSE_SOCKET = 996
    NON_FINITE = 997
    SILENT = 998
    """Taken, but never answered, unless its `queue_timeout_s` passes."""
    STOP_READING = 999
    """Idle, and deaf to every later message."""


def tokens_of(prompt: tuple[int, ...], num_tokens: int, index: int = 0) -> list[int]:
    """What the fake answers: printable ASCII, as a byte-level tokenizer sees it."""
    return [(sum(prompt) + 7 * position + 11 * index) % 90 for position in range(num_tokens)]


def prompt_logprobs_of(submit: Submit) -> PromptLogprobs:
    """Minus a hundredth of the position; ranks are the positions; the best tokens are 1, 2, … at -0.5."""
    num, num_top = len(submit.prompt_token_ids) - 1, submit.sampling.num_prompt_logprobs or 0
    return PromptLogprobs(
        num_top,
        array("f", [-position / 100 for position in range(1, num + 1)]).tobytes(),
        array("i", range(1, num + 1)).tobytes(),
        array("i", range(1, num_top + 1)).tobytes() * num,
        array("f", [-0.5] * num_top * num).tobytes(),
    )


class FakeEngine:
    def __init__(self, connection: socket.socket, flight: FlightWriter, step_s: float) -> None:
        self._connection = connection
        self._flight = flight
        self._step_s = step_s
        self._decoder = FrameDecoder()
        self._running: dict[tuple[int, int], tuple[Submit, SequenceStart, int]] = {}
        """(request, index) → where the sequence began, and how many output tokens it has."""
        self._paused: set[int] = set()
        self._silent: dict[int, float] = {}
        """Those that get no step, and when they expire."""
        self._failures: list[RequestFailure] = []
        self._step_id = 0
        self._num_received = 0
        self._is_deaf = False
        self._is_over = False

    def enter(self, phase: Phase) -> None:
        self._flight.enter(
            phase, now_ns=time.monotonic_ns(), step_id=self._step_id, num_messages_received=self._num_received
        )

    def read(self, timeout_s: float | None) -> list[object]:
        if not select.select([self._connection], [], [], timeout_s)[0]:
            return []
        data = self._connection.recv(2**18)
        if not data:
            os._exit(0)
        return list(self._decoder.feed(data))

    def start(self, load_s: float, fail_with: str) -> None:
        self.enter(Phase.LOADING)
        (config,) = self.read(None)
        assert isinstance(config, EngineConfig)
        self._connection.sendall(encode(LoadProgress("weights", 0.1)))
        time.sleep(load_s)
        if config.standby:
            self._connection.sendall(encode(StandingBy(os.getpid())))
            (activate,) = self.read(None)
            assert isinstance(activate, Activate)
        if fail_with:
            name, _, message = fail_with.partition(":")
            failed = EngineFailed(f"scheduler.errors.{name}", message, "Traceback…", Phase.LOADING, 0, "", True)
            self._connection.sendall(encode(failed))
            os._exit(1)
        ready = Ready(
            os.getpid(), "fake", 1, VOCAB_SIZE, "float32", "cpu", "reference", 16, NUM_KV_BLOCKS, MAX_MODEL_LEN,
            config.max_num_seqs, config.max_num_batched_tokens, 0.1,
        )  # fmt: skip
        self._connection.sendall(encode(ready))

    def run(self) -> None:
        while not self._is_over:
            self.enter(Phase.IDLE if not self._running else Phase.DRAIN)
            if self._is_deaf:
                time.sleep(60)
            for message in self.read(self._step_s if self._running or self._silent else None):
                self._num_received += 1
                self.enter(Phase.DRAIN)
                self.take(message)
            self.step()

    def take(self, message: object) -> None:
        match message:
            case Submit():
                for start in message.sequences:
                    place = len(start.resume_token_ids)
                    self._running[message.request_id, start.index] = (message, start, place)
                if message.prompt_token_ids[0] in set(Trigger):
                    self.misbehave(Trigger(message.prompt_token_ids[0]), message)
            case Abort():
                for request_id in message.request_ids:
                    self._forget(request_id)
                    self._silent.pop(request_id, None)
                for key in message.sequences:
                    self._running.pop(key, None)
            case Pause():
                self._paused.update(message.request_ids)
            case Unpause():
                self._paused.difference_update(message.request_ids)
            case Shutdown():
                self._is_over = True

    def _forget(self, request_id: int) -> None:
        self._running = {key: one for key, one in self._running.items() if key[0] != request_id}

    def begin_step(self, request_ids: list[int]) -> None:
        self._step_id += 1
        self._flight.record(StepShape(self._step_id, len(request_ids), 3, 1, 0, 3), request_ids)
        self.enter(Phase.EXECUTE)

    def misbehave(self, trigger: Trigger, submit: Submit) -> None:
        is_alone = submit.alone_until > len(submit.sequences[0].resume_token_ids)
        self.begin_step([submit.request_id] if is_alone else [request_id for request_id, _ in self._running])
        match trigger:
            case Trigger.EXIT_ZERO:
                os._exit(0)
            case Trigger.SIGKILL | Trigger.SIGSEGV:
                print("last words on stderr", file=sys.stderr, flush=True)
                os.kill(os.getpid(), getattr(signal, trigger.name))
            case Trigger.RAISE:
                self.fail()
            case Trigger.HANG:
                time.sleep(60)
            case Trigger.GARBAGE:
                self._connection.sendall(b"\xff" * 64)
                time.sleep(60)
            case Trigger.CLOSE_SOCKET:
                self._connection.shutdown(socket.SHUT_RDWR)
                time.sleep(60)
            case Trigger.NON_FINITE:
                self._forget(submit.request_id)
                self._failures.append(RequestFailure(submit.request_id, FailureKind.NON_FINITE))
            case Trigger.SILENT:
                self._forget(submit.request_id)
                if submit.queue_timeout_s is not None:
                    self._silent[submit.request_id] = time.monotonic() + submit.queue_timeout_s
            case Trigger.STOP_READING:
                self._running.clear()
                self._is_deaf = True

    def fail(self) -> None:
        frames = "".join(traceback.format_exception(RuntimeError("the root cause")))
        report = EngineFailed(
            "builtins.RuntimeError", "the root cause", frames, Phase.EXECUTE, self._step_id, "num_seqs=1", False
        )
        self._connection.sendall(encode(report))
        os._exit(1)

    def step(self) -> None:
        outputs = []
        for request_id in [one for one, until_s in self._silent.items() if time.monotonic() >= until_s]:
            del self._silent[request_id]
            self._failures.append(RequestFailure(request_id, FailureKind.QUEUE_TIMEOUT))
        batch = [one for one in self._running.items() if one[0][0] not in self._paused]
        alone = [one for one in batch if one[1][2] < one[1][0].alone_until]
        batch = alone[:1] or batch
        self.begin_step([request_id for (request_id, _), _ in batch])
        for (request_id, index), (submit, start, position) in batch:
            is_first = position == len(start.resume_token_ids)
            if start.resume_token_ids and is_first:
                over = finish_reason_after(
                    start.resume_token_ids[-1],
                    num_prompt_tokens=len(submit.prompt_token_ids),
                    num_tokens=len(submit.prompt_token_ids) + position,
                    stopping=submit.stopping,
                    max_model_len=MAX_MODEL_LEN,
                )
                if over is not None:
                    outputs.append(SequenceOutput(request_id, index, (), finish_reason=over, num_cached_tokens=0))
                    del self._running[request_id, index]
                    continue
            prompt_logprobs = None
            if is_first and index == 0 and submit.sampling.num_prompt_logprobs is not None:
                prompt_logprobs = prompt_logprobs_of(submit)
            if submit.stopping.max_tokens == 0:
                end = FinishReason.MAX_TOKENS
                outputs.append(SequenceOutput(request_id, index, (), None, end, 0, prompt_logprobs))
                del self._running[request_id, index]
                continue
            token_id = tokens_of(submit.prompt_token_ids, position + 1, index)[position]
            is_last = position + 1 >= submit.stopping.max_tokens
            cached = 0 if is_first else None
            reason = FinishReason.MAX_TOKENS if is_last else None
            outputs.append(SequenceOutput(request_id, index, (token_id,), None, reason, cached, prompt_logprobs))
            if is_last:
                del self._running[request_id, index]
            else:
                self._running[request_id, index] = (submit, start, position + 1)
        stats = EngineStats(
            num_running=len(self._running), num_used_kv_blocks=len(self._running), num_kv_blocks=NUM_KV_BLOCKS
        )
        failures, self._failures = tuple(self._failures), []
        self.enter(Phase.SEND)
        self._connection.sendall(encode(StepOutputs(self._step_id, tuple(outputs), failures, stats)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--flight-recorder-fd", type=int, required=True)
    parser.add_argument("--stacks-fd", type=int, required=True)
    parser.add_argument("--load-s", type=float, default=0)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--fail-with", default="", help="Type:message of a failure to start")
    parser.add_argument("--fail-if", default="", help="fail so only while this file exists")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, file=arguments.stacks_fd, all_threads=True)
    connection = socket.socket(fileno=arguments.socket_fd)
    engine = FakeEngine(connection, FlightWriter(arguments.flight_recorder_fd), arguments.step_s)
    is_failing = not arguments.fail_if or os.path.exists(arguments.fail_if)  # noqa: PTH110 - a line in a fake
    engine.start(arguments.load_s, arguments.fail_with if is_failing else "")
    engine.run()


if __name__ == "__main__":
    main()
