"""What the two clients have in common: how each call is made of its arguments, whatever waits for the answer.

What lives here: channels' stubs, request messages, time-outs. What must not: waiting (`sync.py`, `aio.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from emberline.client import _messages, errors
from emberline.client._progress import Progress, Resume
from emberline.client.connection import Connection
from emberline.client.request import Prompt, Turn, generate_request
from emberline.v1 import admin_pb2_grpc, inference_pb2_grpc, info_pb2_grpc, tokenizer_pb2_grpc


@dataclass(frozen=True, slots=True)
class Defaults:
    """Of a client's calls."""

    timeout_s: float | None = None
    resume: bool | Resume = False


class Stubs:
    """All rpcs, on two channels.

    Generate and Complete go where the model serves. All else (tokens, limits, load, health) is answered without an
    engine, and is asked for most when none serves: its channel does not look at health.
    """

    def __init__(self, for_inference: Any, for_rest: Any) -> None:
        self.channels = (for_inference, for_rest)
        inference = inference_pb2_grpc.InferenceServiceStub(for_inference)
        tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(for_rest)
        info = info_pb2_grpc.InfoServiceStub(for_rest)
        admin = admin_pb2_grpc.AdminServiceStub(for_rest)
        self.generate: Any = inference.Generate
        self.complete: Any = inference.Complete
        self.tokenize: Any = tokenizer.Tokenize
        self.detokenize: Any = tokenizer.Detokenize
        self.model_info: Any = info.GetModelInfo
        self.server_info: Any = info.GetServerInfo
        self.load: Any = info.GetLoad
        self.abort: Any = admin.Abort
        self.drain: Any = admin.Drain
        ask, told = _messages.HealthCheckRequest.SerializeToString, _messages.HealthCheckResponse.FromString
        path = "/grpc.health.v1.Health/"
        self.check: Any = for_rest.unary_unary(path + "Check", request_serializer=ask, response_deserializer=told)
        self.watch: Any = for_rest.unary_stream(path + "Watch", request_serializer=ask, response_deserializer=told)


@dataclass(frozen=True, slots=True)
class Attempts:
    """All that the attempts of one Generate need."""

    progress: Progress
    deadline_s: float | None
    """On `time.monotonic`."""
    metadata: Sequence[tuple[str, str | bytes]]
    connection: Connection

    def arguments(self) -> dict[str, Any]:
        """Of the next attempt."""
        timeout_s = None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
        return {"timeout": timeout_s, "metadata": (*self.connection.metadata(), *self.metadata)}

    def delay_s(self, error: errors.EmberlineError) -> float:
        """How long to wait before the next attempt; raises what the caller shall see if there is none."""
        delay_s = self.progress.after(error)
        if self.deadline_s is not None and time.monotonic() + delay_s >= self.deadline_s:
            error.add_note("the call's deadline comes before the next attempt")
            raise error
        return delay_s


def attempts(
    connection: Connection,
    defaults: Defaults,
    prompt: Prompt | None,
    chat: Sequence[Turn] | None,
    options: Mapping[str, Any],
    *,
    timeout_s: float | None,
    resume: bool | Resume | None,
    metadata: Sequence[tuple[str, str | bytes]],
) -> Attempts:
    """Raises TypeError and ValueError for what can be no call."""
    request = generate_request(prompt, chat, options)
    policy: bool | Resume | None = defaults.resume if resume is None else resume
    if isinstance(policy, bool):
        policy = Resume() if policy else None
    progress = Progress(
        request,
        policy,
        has_others=connection.is_balanced(),
        clock=time.monotonic,
        jitter=random.random,
    )
    timeout_s = defaults.timeout_s if timeout_s is None else timeout_s
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    return Attempts(progress, deadline_s, tuple(metadata), connection)


def health_status(response: Any) -> str:
    """By name; a number that is newer than this client is told as such."""
    statuses = _messages.HEALTH_STATUSES
    return statuses[response.status] if 0 <= response.status < len(statuses) else str(response.status)


def incomplete() -> errors.IncompleteStreamError:
    """For a stream that ended with OK before its last message."""
    return errors.IncompleteStreamError(grpc.StatusCode.UNKNOWN, "the stream ended before its last message")


def cancelled() -> errors.RequestCancelledError:
    """For whoever waits for a call, or reads a stream, that was closed meanwhile."""
    return errors.RequestCancelledError(grpc.StatusCode.CANCELLED, "the call was closed by this program")
