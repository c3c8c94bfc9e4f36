"""Which request kills engines? Suspicion, proof, and a memory of both.

What lives here: fingerprints of requests, what each is suspected of, and the verdict at a death. What must not: I/O,
routing, what a caller is told. Clock and salt are handed in; nothing kept here tells a prompt: digests only, keyed with
a salt of this process.

The law. Everything in a dying step is a *suspect*, not more: one of them was the cause, or none (somebody sent a
signal). A suspect's fingerprint is remembered with its *place*, the output count it must get past; whoever comes with
that fingerprint again, replayed or resubmitted, is sent with `alone_until` = place, so that its steps hold nothing
else until then. (A fingerprint's place is that of its copy which was furthest; a copy that was in the step itself, and
is replayed, has only its own to get past.) If it gets past, it is *cleared*. If it dies there, alone because of the
suspicion, it is the *killer*: a fingerprint refused for a while. A request that merely happened to be the only one in
a dying step is a suspect like any other, and one that was in many dying steps beside others stays one.

So a poison has two deaths: one that makes it a suspect, one that proves it. For this to hold

- a suspect counts from the moment it is *sent* (`on_sent`), not from when its death has been handled. One copy at a
  time is on trial, and what it comes to holds for all: the others wait for it (`must_wait`) instead of running alone
  one after another, which takes many times as long as their batch. If its caller leaves, the next one goes to the
  engine that had it (`trial_engine`): an engine dies once, whether its death is handled late or not;
- a caller that leaves does not take the evidence along: `on_left` keeps what the engine may still be computing;
- a place is reached step by step, but what the front end has counted may lag behind: with each dying step that the same
  fingerprint was in, the place is put further beyond the count (1, 2, 4, 8 tokens).

Copies that are running unsuspected on several engines when the first death is handled can each still take their engine:
no death while unsuspected is proof, or two signals at once would convict whatever prompt many callers have in common.
A hang is handled late by nature; `on_stall` makes its step suspects as soon as it looks like one.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from scheduler.messages import Submit

CAPACITY = 4096
"""Fingerprints of each kind that are remembered; as many as a step can hold requests."""
POISON_TTL_S = 600.0
SUSPECT_TTL_S = 600.0
LEFT_TTL_S = 120.0
"""How long an engine may go on computing what it was told to forget; a hang is found well before."""
MARGIN_BASE = 2
MARGIN_POWER_MAX = 3
_DIGEST_BYTES = 16
_encoder = msgspec.msgpack.Encoder()
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Suspect:
    """One request of a dying step."""

    submit: Submit
    """As it was sent to the engine that died."""
    num_outputs: int
    """Output tokens it had, resumed ones included; the most that any of its sequences had."""
    was_alone: bool
    """Because it was suspected, steps that computed any of one of its sequences held nothing else."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a death comes to, in the server's own numbers of requests."""

    killer_id: int | None = None
    suspect_ids: tuple[int, ...] = ()
    """All others of the step."""


@dataclass(slots=True)
class _Record:
    """What is held against one fingerprint."""

    place: int = 0
    """Run alone until it has this many output tokens; 0: cleared."""
    num_dying_steps: int = 0
    trial_engine: int | None = None
    """Where copies of unknown outcome went."""
    trial_id: int | None = None
    """The copy whose outcome the others wait for."""


@dataclass(frozen=True, slots=True)
class _InStep:
    """What is known of a request that may be in a dying step. No prompt: its caller may be long gone."""

    request_id: int
    fingerprint: bytes
    num_outputs: int
    was_alone: bool


class _Memory(Generic[_Key, _Value]):
    """A bounded number of values, each for a time; the one not asked for the longest goes first."""

    def __init__(self, clock: Callable[[], float], capacity: int) -> None:
        self._clock = clock
        self._capacity = capacity
        self._entries: OrderedDict[_Key, tuple[float, _Value]] = OrderedDict()
        self._all_expired_s = -float("inf")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_empty(self) -> bool:
        """Nothing is kept. Costs no more than a look at the clock, and forgets all once all is expired."""
        if self._entries and self._all_expired_s <= self._clock():
            self._entries.clear()
        return not self._entries

    def values(self) -> Iterable[_Value]:
        return (value for _, value in self._entries.values())

    def get(self, key: _Key) -> _Value | None:
        expires_s, value = self._entries.get(key, (0.0, None))
        if value is None:
            return None
        if expires_s <= self._clock():
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: _Key, value: _Value, ttl_s: float) -> None:
        expires_s = self._clock() + ttl_s
        self._entries[key] = (expires_s, value)
        self._entries.move_to_end(key)
        self._all_expired_s = max(self._all_expired_s, expires_s)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)


class Blame:
    """One per server; its replicas share it."""

    def __init__(
        self,
        clock: Callable[[], float],
        salt: bytes,
        capacity: int = CAPACITY,
        poison_ttl_s: float = POISON_TTL_S,
        suspect_ttl_s: float = SUSPECT_TTL_S,
    ) -> None:
        """`salt`: at most 64 random bytes, drawn anew by each process."""
        self._salt = salt
        self._poison_ttl_s = poison_ttl_s
        self._suspect_ttl_s = suspect_ttl_s
        self._records: _Memory[bytes, _Record] = _Memory(clock, capacity)
        self._poisons: _Memory[bytes, bool] = _Memory(clock, capacity)
        self._own_places: _Memory[int, int] = _Memory(clock, capacity)
        self._left: _Memory[int, _InStep] = _Memory(clock, capacity)

    def fingerprint(self, submit: Submit) -> bytes:
        """The same for every attempt of one request, and for whoever sends the like of it: the prompt, and all that
        says how to sample and when to stop, a guide included. Not the seed (it is drawn anew), not what has been
        resumed, not how many sequences there are (those that finished are not sent again) and not whether the prompt
        is scored (what was told of it is not asked for again).
        """
        sampling = dataclasses.replace(submit.sampling, seed=0, num_prompt_logprobs=None)
        data = _encoder.encode((submit.prompt_token_ids, sampling, submit.stopping, submit.guide))
        return hashlib.blake2b(data, key=self._salt, digest_size=_DIGEST_BYTES).digest()

    # Before a request is sent

    def is_poison(self, submit: Submit) -> bool:
        """Refuse it: it has killed engines, and lately."""
        if self._poisons.is_empty:
            return False  # the usual case costs no digest
        return self._poisons.get(self.fingerprint(submit)) is not None

    def alone_until(self, submit: Submit) -> int:
        """What its `Submit.alone_until` has to be; 0 if nothing is held against it."""
        record = self._find(submit)
        if record is None:
            return 0
        own_place = self._own_places.get(submit.request_id)
        return record.place if own_place is None else min(own_place, record.place)

    def must_wait(self, submit: Submit) -> bool:
        """Another copy of this suspect is on trial."""
        record = self._find(submit)
        return record is not None and record.trial_id not in (None, submit.request_id)

    def trial_engine(self, submit: Submit) -> int | None:
        """The engine that has a copy of this suspect whose outcome is unknown: send this one there as well, and to no
        other. None: any will do.
        """
        record = self._find(submit)
        return None if record is None else record.trial_engine

    def on_sent(self, submit: Submit, engine: int) -> None:
        """It is being sent to this engine. From now on it counts, whatever becomes of the news of its end."""
        record = self._find(submit)
        if record is not None and record.place:
            record.trial_engine = engine
            record.trial_id = submit.request_id

    # What becomes of it

    def cleared(self, submit: Submit) -> None:
        """It got past its place, finished, or failed without its engine: nothing more is held against it. For requests
        sent with an `alone_until`; for others it does nothing.
        """
        record = self._find(submit) if submit.alone_until else None
        if record is None:
            return
        if record.trial_id == submit.request_id:
            record.trial_id = None
        if submit.alone_until >= record.place:  # a copy may since have died further on
            record.place = 0  # in how many dying steps it was is kept while the record lasts
            record.trial_engine = record.trial_id = None

    def on_left(self, suspect: Suspect) -> None:
        """Its caller is gone before its end, and its engine has been told to forget it. Until the engine does, it may
        be in a step that dies, and whoever leaves first must not go free: a trial goes on without its caller.
        """
        request = self._in_step(suspect)
        self._left.put(request.request_id, request, LEFT_TTL_S)
        record = self._records.get(request.fingerprint)
        if record is not None and record.trial_id == request.request_id:
            record.trial_id = None

    def on_stall(self, in_step: Sequence[Suspect], left_ids: Sequence[int] = ()) -> None:
        """An engine looks as if it hung (the hang watch says SUSPECT): the like of what is in its step runs alone from
        now on, before the death that may come of it. If none comes, the first copy to get through is the end of it.
        """
        for fingerprint, num_outputs in _furthest(self._known(in_step, left_ids)).items():
            record = self._records.get(fingerprint) or _Record()
            record.place = max(record.place, num_outputs + 1)
            self._records.put(fingerprint, record, self._suspect_ttl_s)

    def on_death(self, engine: int, in_step: Sequence[Suspect], left_ids: Sequence[int] = ()) -> Verdicts:
        """An engine died: judge the requests of its last step.

        Args:
            engine: Which.
            in_step: Of the step's requests, those whose callers are still there.
            left_ids: The numbers of all others in the step.
        """
        for record in self._records.values():
            if record.trial_engine == engine:
                record.trial_engine = record.trial_id = None
        # Beside others it was not alone, whatever was counted: the engine had it past its place already.
        had_step_to_itself = len(in_step) + len(left_ids) == 1
        step = self._known(in_step, left_ids)
        killer_id = None
        if had_step_to_itself and step and step[0].was_alone and self._is_suspect(step[0].fingerprint):
            killer_id = step[0].request_id
        margins = {
            fingerprint: self._accuse(fingerprint, num_outputs, is_killer=killer_id is not None)
            for fingerprint, num_outputs in _furthest(step).items()
        }
        for request in step:
            own_place = request.num_outputs + margins[request.fingerprint]
            self._own_places.put(request.request_id, own_place, self._suspect_ttl_s)
        return Verdicts(killer_id, tuple(r.request_id for r in step if r.request_id != killer_id))

    def _known(self, in_step: Sequence[Suspect], left_ids: Sequence[int]) -> list[_InStep]:
        step = [self._in_step(suspect) for suspect in in_step]
        return step + [left for request_id in left_ids if (left := self._left.get(request_id)) is not None]

    def _in_step(self, suspect: Suspect) -> _InStep:
        submit = suspect.submit
        return _InStep(submit.request_id, self.fingerprint(submit), suspect.num_outputs, suspect.was_alone)

    def _find(self, submit: Submit) -> _Record | None:
        if self._records.is_empty:
            return None  # the usual case costs no digest
        return self._records.get(self.fingerprint(submit))

    def _is_suspect(self, fingerprint: bytes) -> bool:
        """For one that was sent as a suspect: another copy may have cleared it since. If there is no record, others
        pushed it out, and the request itself is witness enough.
        """
        record = self._records.get(fingerprint)
        return record is None or record.place > 0

    def _accuse(self, fingerprint: bytes, num_outputs: int, *, is_killer: bool) -> int:
        """Hold one more dying step against it. Returns how far beyond the count its place now is."""
        record = self._records.get(fingerprint) or _Record()
        margin: int = MARGIN_BASE ** min(record.num_dying_steps, MARGIN_POWER_MAX)
        record.num_dying_steps += 1
        record.place = max(record.place, num_outputs + margin)
        ttl_s = self._suspect_ttl_s
        if is_killer:
            self._poisons.put(fingerprint, True, self._poison_ttl_s)
            ttl_s += self._poison_ttl_s  # let in again it is a suspect, whose next death is proof
        self._records.put(fingerprint, record, ttl_s)
        return margin


def _furthest(step: Iterable[_InStep]) -> dict[bytes, int]:
    """Of each fingerprint, the output count of the copy that had most."""
    furthest: dict[bytes, int] = {}
    for request in step:
        furthest[request.fingerprint] = max(request.num_outputs, furthest.get(request.fingerprint, 0))
    return furthest
