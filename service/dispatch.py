"""Which engine runs which stream; and, when one dies, what becomes of each of its streams.

What lives here: the way from a request to an engine, the streams that wait for one, and the sorting after a death. What
must not: processes (`supervisor.py`), who is to blame (`blame.py` decides that), sockets, gRPC.

After a death, within the same callback of the loop:

| the stream | goes on after a death | does not |
|---|---|---|
| was not in the dying step | is sent again at once, where it was | ends UNAVAILABLE, with the time to come back |
| was in it | is sent again to run alone until it is past that place | ends UNAVAILABLE, never to be retried |
| was in it because it ran alone | has killed: INTERNAL, POISON_REQUEST, and refused for a while | the same |

"Again" means behind the last token that came: the new engine is told those tokens as resumed ones. A stream waits here
while no engine serves, and is ended when none will; so is one that got nowhere in `FRUITLESS_DEATHS_MAX` dying steps.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler import logs
from scheduler.flight_record import FlightRecord
from scheduler.messages import Phase, Submit
from service.blame import Blame, Suspect
from service.crash_report import LABEL_CHARS_MAX, RequestFacts
from service.death import Aftermath, Death
from service.engine import Engine
from service.errors import CallError, EngineDeadError, PoisonRequestError
from service.journal import Journal, JournalEntry
from service.metrics.recorder import Metrics
from service.replica import EngineState, Replica
from service.router import Candidate, Router
from service.stream import STREAM_BUFFER_TOKENS, RequestStream
from service.supervisor import Supervisor
from service.time_limits import NO_TIME_LIMITS, TimeLimits
from service.totals import Totals

FRUITLESS_DEATHS_MAX = 3
ATTEMPTS_MAX = 100
"""However well it goes on each time."""


class Dispatcher:
    """The streams of one server, between admission and the engines."""

    def __init__(
        self,
        journal: Journal,
        supervisor: Supervisor,
        blame: Blame,
        router: Router,
        *,
        stream_buffer_tokens: int = STREAM_BUFFER_TOKENS,
        totals: Totals | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._totals = totals or Totals()
        self._metrics = metrics or Metrics()
        self._stream_buffer_tokens = stream_buffer_tokens
        self._journal = journal
        self._supervisor = supervisor
        self._blame = blame
        self._router = router
        self._streams: dict[int, RequestStream] = {}
        """All that are open, by id."""
        self._replica_of: dict[int, Replica] = {}
        self._waiting: dict[int, RequestStream] = {}
        """Those that no engine has, in order: none serves, or the like of them is on trial."""

    @property
    def num_waiting(self) -> int:
        """Streams that wait for an engine."""
        return len(self._waiting)

    def open(
        self, submit: Submit, *, label: str, is_replayed: bool, time_limits: TimeLimits = NO_TIME_LIMITS
    ) -> RequestStream:
        """Give a request to an engine, or let it wait for the next one if that is coming.

        Raises:
            PoisonRequestError: the same request killed an engine a while ago.
            CallError: no engine will come.
        """
        if self._blame.is_poison(submit):
            self._totals.num_poison_refused += 1
            raise PoisonRequestError
        if not self._supervisor.can_recover:
            raise self._supervisor.refusal()
        entry = self._journal.open(submit, label=label, is_replayed=is_replayed)
        stream = self._streams[submit.request_id] = RequestStream(
            entry, self, time_limits=time_limits, buffer_tokens=self._stream_buffer_tokens
        )
        self._waiting[submit.request_id] = stream
        if self._supervisor.is_serving:  # whoever waits all the same has another reason
            self._send(stream, self._alone_until(stream))
        return stream

    def leave(self, stream: RequestStream, *, is_over: bool, is_done: bool) -> None:
        """The reader is gone; see `RequestStream.close`. Idempotent."""
        request_id = stream.request_id
        if self._streams.pop(request_id, None) is None:
            return
        self._journal.close(request_id)
        self._waiting.pop(request_id, None)
        replica = self._replica_of.pop(request_id, None)
        entry = stream.entry
        if replica is not None:
            if entry.sent is not None and not (is_over or is_done):
                self._blame.on_left(_suspect(entry))
            elif entry.sent is not None:
                self._blame.cleared(entry.sent)
            self._router.on_end(request_id)
            if replica.engine is not None:
                replica.engine.client.leave(request_id, abort=not is_over)
            if entry.sent is not None and entry.sent.alone_until:
                self._send_waiting()  # the like of it may have waited for it

    def abort(self, labels: Sequence[str], make_error: Callable[[], CallError]) -> set[str]:
        """End the streams with these labels, and let their engines forget them; returns those that were not over."""
        wanted = set(labels)
        found = [stream for stream in self._streams.values() if stream.entry.label in wanted and not stream.is_over]
        for stream in found:
            self.leave(stream, is_over=False, is_done=False)
            stream.end(make_error)
        return {stream.entry.label for stream in found}

    def end_sequence(self, stream: RequestStream, index: int) -> None:
        """One of its sequences has all that its reader wants of it."""
        stream.entry.finished.add(index)
        if stream.entry.is_finished:
            self._waiting.pop(stream.request_id, None)  # what is left of it waits for its reader
        replica = self._replica_of.get(stream.request_id)
        if replica is not None and replica.engine is not None:
            replica.engine.client.abort_sequence(stream.request_id, index)

    def pause(self, stream: RequestStream) -> None:
        """The stream is full; no more steps for it."""
        replica = self._replica_of.get(stream.request_id)
        if replica is not None and replica.engine is not None:
            replica.engine.client.pause(stream.request_id)

    def unpause(self, stream: RequestStream) -> None:
        """Its reader has taken everything."""
        replica = self._replica_of.get(stream.request_id)
        if replica is not None and replica.engine is not None:
            replica.engine.client.unpause(stream.request_id)

    def is_waiting(self, stream: RequestStream) -> bool:
        """Whether no engine has it."""
        return stream.request_id in self._waiting

    def is_in_step(self, stream: RequestStream) -> bool:
        """Whether its engine is computing it right now, as the flight recorder tells."""
        replica = self._replica_of.get(stream.request_id)
        engine = replica.engine if replica is not None else None
        if engine is None or engine.process is None:
            return False
        return stream.request_id in (engine.request_ids_in_step(engine.process.flight.read()) or ())

    def end_all(self, make_error: Callable[[], CallError]) -> int:
        """End every stream that is not over; returns how many there were."""
        streams = [stream for stream in self._streams.values() if not stream.is_over]
        for stream in streams:
            stream.end(make_error)
        self._waiting.clear()
        return len(streams)

    # What the supervisor tells

    def on_replica_ready(self, _replica: Replica) -> None:
        """Somebody can take those who wait."""
        self._send_waiting()

    def on_replica_output(self, replica: Replica, stream: RequestStream, num_tokens: int) -> None:
        """A step has brought a stream something."""
        entry = stream.entry
        self._note_output(replica, stream, num_tokens)
        self._router.on_output(stream.request_id, num_tokens)
        if entry.sent is not None and entry.gets_past_its_place():
            self._blame.cleared(entry.sent)
            self._send_waiting()
        if entry.is_finished:
            self._router.on_end(stream.request_id)

    def on_replica_stall(self, replica: Replica) -> None:
        """Its step takes suspiciously long: whatever else is like what is in it, runs alone from now on."""
        engine = replica.engine
        if engine is not None and engine.process is not None:
            in_step, left_ids = _in_step(engine, engine.process.flight.read(), engine.client.streams())
            self._blame.on_stall([_suspect(stream.entry) for stream in in_step], left_ids)

    def on_replica_death(self, replica: Replica, death: Death) -> None:
        """Sort the dead engine's streams; see the table above."""
        engine = replica.engine
        assert engine is not None
        streams = engine.client.detach()
        in_step, left_ids = _in_step(engine, death.record, streams)
        suspected_ids = {stream.request_id for stream in in_step}
        others = [stream for stream in streams if stream.request_id not in suspected_ids]
        self._router.on_death(replica.index)
        for stream in streams:
            self._replica_of.pop(stream.request_id, None)
            stream.timeline.deaths.append((death.monotonic_s, death.death_id))
        suspects = [_suspect(stream.entry) for stream in in_step]
        killer_id = self._blame.on_death(replica.index, suspects, left_ids).killer_id
        make_poison_error = functools.partial(PoisonRequestError, death.death_id)
        aftermath = death.aftermath
        aftermath.requests = [_facts(stream.entry) for stream in in_step]
        aftermath.killer_id = killer_id
        self._totals.num_poison_found += killer_id is not None
        for stream in in_step:
            if stream.request_id == killer_id:
                aftermath.killer_label = stream.entry.label[:LABEL_CHARS_MAX]
                self._end(stream, make_poison_error, aftermath)
                continue
            entry = stream.entry
            entry.num_fruitless_deaths = 0 if entry.has_progressed else entry.num_fruitless_deaths + 1
            self._go_on_or_end(stream, death, aftermath, in_step=True)
        for stream in others:
            self._go_on_or_end(stream, death, aftermath, in_step=False)
        if killer_id is not None:
            self._end_twins(make_poison_error, aftermath)
        self._send_waiting()

    # What is noted of it

    def _note_sent(self, stream: RequestStream, index: int) -> None:
        timeline, now_s = stream.timeline, asyncio.get_running_loop().time()
        if timeline.sent_s is None:
            timeline.sent_s = now_s
        else:
            self._totals.num_replays += 1
        timeline.attempts.append((now_s, index))

    def _note_output(self, replica: Replica, stream: RequestStream, num_tokens: int) -> None:
        """Once for each sequence in a step: the time is the step's, so its siblings are no intervals."""
        self._totals.num_generated_tokens += num_tokens
        assert replica.engine is not None
        timeline, now_s = stream.timeline, replica.engine.client.step_taken_s
        if timeline.last_output_s is None:
            timeline.first_output_s = now_s
        elif now_s > timeline.last_output_s:
            self._metrics.between_tokens(now_s - timeline.last_output_s)
        timeline.last_output_s = now_s

    # The walk of a stream

    def _go_on_or_end(self, stream: RequestStream, death: Death, aftermath: Aftermath, *, in_step: bool) -> None:
        entry = stream.entry
        has_attempts = entry.num_fruitless_deaths < FRUITLESS_DEATHS_MAX and entry.num_sent < ATTEMPTS_MAX
        if entry.is_replayed and stream.is_late(asyncio.get_running_loop().time()):
            stream.end_late()  # what it waited for is a first step, and that begins anew
            aftermath.num_ended += 1
            return
        if entry.is_replayed and has_attempts and self._supervisor.can_recover:
            self._waiting[stream.request_id] = stream
            aftermath.num_replayed += 1
            return
        retry_after_s = None if in_step else self._supervisor.expected_serving_s()
        make_error = functools.partial(EngineDeadError, death.death_id, in_step=in_step, retry_after_s=retry_after_s)
        self._end(stream, make_error, aftermath)

    @staticmethod
    def _end(stream: RequestStream, make_error: Callable[[], CallError], aftermath: Aftermath) -> None:
        stream.end(make_error)
        aftermath.num_ended += 1

    def _end_twins(self, make_error: Callable[[], CallError], aftermath: Aftermath) -> None:
        """The like of a killer, wherever it waits or runs: it would kill, too."""
        for request_id, stream in self._streams.items():
            if stream.is_over or not self._blame.is_poison(stream.entry.submit):
                continue
            self._waiting.pop(request_id, None)
            replica = self._replica_of.pop(request_id, None)
            if replica is not None and replica.engine is not None:
                self._router.on_end(request_id)
                replica.engine.client.leave(request_id, abort=True)
            self._end(stream, make_error, aftermath)

    def _send_waiting(self) -> None:
        """Innocents first: they go on at once, and a suspect's death would cost them another start."""
        if not self._waiting or not self._supervisor.is_serving:
            return
        streams = [(self._alone_until(stream), stream) for stream in self._waiting.values()]
        for alone_until, stream in sorted(streams, key=lambda pair: pair[0] > 0):
            self._send(stream, alone_until)

    def _alone_until(self, stream: RequestStream) -> int:
        return self._blame.alone_until(stream.entry.submit)

    def _send(self, stream: RequestStream, alone_until: int) -> None:
        """Send one stream to the best engine; it waits on if there is none for it."""
        if self._blame.must_wait(stream.entry.submit):
            return
        trial_engine = self._blame.trial_engine(stream.entry.submit)
        candidates = [
            Candidate(replica.index, is_suspect=replica.state is EngineState.SUSPECT)
            for replica in self._supervisor.replicas
            if replica.is_serving and trial_engine in (None, replica.index)
        ]
        now_s = asyncio.get_running_loop().time()
        if stream.is_over or stream.is_late(now_s):
            del self._waiting[stream.request_id]
            if not stream.is_over:
                stream.end_late()
            return
        submit = stream.entry.next_attempt(alone_until)
        if not stream.entry.has_output:
            submit = replace(submit, queue_timeout_s=stream.time_limits.queue_timeout_s(now_s))
        index = self._router.choose(candidates, submit)
        if index is None:
            return
        replica = self._supervisor.replicas[index]
        assert replica.engine is not None
        del self._waiting[stream.request_id]
        self._blame.on_sent(submit, index)
        self._router.on_sent(index, submit)
        self._replica_of[stream.request_id] = replica
        replica.engine.send(stream, submit)
        self._note_sent(stream, index)
        if stream.is_paused:
            replica.engine.client.pause(stream.request_id)
        if stream.entry.num_sent > 1:
            logs.get_logger().debug(  # a crowd's lines; how many there are is in the death's record
                "stream goes on",
                request_id=stream.entry.label,
                engine=index,
                attempt=stream.entry.num_sent,
                num_output_tokens=stream.entry.num_output_tokens,
                alone=alone_until > 0,
            )


def _in_step(
    engine: Engine, record: FlightRecord, streams: Sequence[RequestStream]
) -> tuple[list[RequestStream], tuple[int, ...]]:
    """Those of the streams that are in the engine's present step, and the numbers of others in it, whose callers left.
    Where no step was made yet it is all that the engine had taken; while it was taking some, all that it was sent, for
    it tells how many it took only after that.
    """
    request_ids = engine.request_ids_in_step(record)
    if request_ids is None:
        if record.phase is Phase.DRAIN:
            return list(streams), ()
        num_received = record.num_messages_received
        return [stream for stream in streams if stream.entry.was_received(num_received)], ()
    in_step = [stream for stream in streams if stream.request_id in request_ids]
    return in_step, tuple(request_ids - {stream.request_id for stream in in_step})


def _suspect(entry: JournalEntry) -> Suspect:
    assert entry.sent is not None
    return Suspect(entry.sent, entry.num_output_tokens, was_alone=entry.is_alone)


def _facts(entry: JournalEntry) -> RequestFacts:
    """What a crash report says of a request: numbers and the caller's label."""
    return RequestFacts(
        request_id=entry.submit.request_id,
        label=entry.label[:LABEL_CHARS_MAX],
        num_prompt_tokens=len(entry.submit.prompt_token_ids),
        num_output_tokens=entry.num_output_tokens,
        was_alone=entry.is_alone,
    )
