"""Supervisor and dispatcher wired together as the server does it, without gRPC, over fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler.messages import Ready, Submit
from service.blame import Blame
from service.death import Death
from service.dispatch import Dispatcher
from service.engine import Engine, EngineSettings
from service.errors import CallError
from service.journal import Journal
from service.replica import EngineState, Replica
from service.router import Router
from service.stream import RequestStream
from service.supervisor import GiveUp, Supervisor
from tests.service.support import ENGINE_CONFIG, HANG_S, fake_engine, until


class Rig:
    def __init__(self, num_replicas: int, flags: dict[str, object], options: dict[str, Any]) -> None:
        self.journal = Journal()
        self.deaths: list[Death] = []
        self.is_hopeless = False
        settings = EngineSettings(fake_engine(**flags), 1, options.pop("step_deadline_s", HANG_S))
        options.setdefault("max_restarts", 0)
        self.supervisor = Supervisor(ENGINE_CONFIG, self, settings, device_indices=[None] * num_replicas, **options)
        self.dispatcher = Dispatcher(self.journal, self.supervisor, Blame(lambda: 0.0, b"salt"), Router(num_replicas))

    def on_replica_ready(self, replica: Replica, ready: Ready) -> None:
        self.dispatcher.on_replica_ready(replica)

    def on_replica_death(self, replica: Replica, death: Death) -> None:
        self.deaths.append(death)
        self.dispatcher.on_replica_death(replica, death)

    def on_replica_stall(self, replica: Replica) -> None:
        self.dispatcher.on_replica_stall(replica)

    def on_replica_output(self, replica: Replica, stream: RequestStream, num_tokens: int) -> None:
        self.dispatcher.on_replica_output(replica, stream, num_tokens)

    def on_last_hope_lost(self) -> None:
        self.is_hopeless = True
        self.dispatcher.end_all(self.supervisor.refusal)

    @property
    def replica(self) -> Replica:
        return self.supervisor.replicas[0]

    @property
    def engine(self) -> Engine:
        assert self.replica.engine is not None
        return self.replica.engine

    def generate(self, submit: Submit, *, replay: bool = False) -> RequestStream:
        return self.dispatcher.open(submit, label=f"label-{submit.request_id}", is_replayed=replay)

    async def all_serving(self) -> None:
        await until(lambda: all(replica.is_serving for replica in self.supervisor.replicas))

    async def given_up(self) -> GiveUp:
        return await asyncio.wait_for(asyncio.shield(self.supervisor.gave_up), HANG_S)

    async def in_state(self, state: EngineState) -> None:
        await until(lambda: self.replica.state is state)


@asynccontextmanager
async def rig(
    num_replicas: int = 1, *, flags: dict[str, object] | None = None, wait: bool = True, **options: Any
) -> AsyncIterator[Rig]:
    """`flags` are the fake engine's, `options` the supervisor's."""
    made = Rig(num_replicas, flags or {}, options)
    await made.supervisor.start()
    try:
        if wait:
            await made.all_serving()
        yield made
    finally:
        await made.supervisor.stop()


async def collect(stream: RequestStream) -> list[int]:
    """All tokens of a stream."""
    token_ids: list[int] = []
    with stream:
        while True:
            outputs = await asyncio.wait_for(stream.next(), HANG_S)
            for output in outputs:
                token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    return token_ids


async def error_of(stream: RequestStream) -> CallError:
    with pytest.raises(CallError) as caught:
        await collect(stream)
    return caught.value


async def collect_all(streams: Sequence[RequestStream]) -> list[list[int]]:
    return list(await asyncio.gather(*(collect(stream) for stream in streams)))
