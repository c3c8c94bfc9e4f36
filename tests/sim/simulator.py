"""A seeded world around the scheduler: arrivals, impatient callers, slow readers, poison, failed steps, a clock that
steps advance.

Everything that happens is drawn from one seed, so a run can be told again by its seed alone; `Report.trace_sha256`
covers every plan and every output. The runner checks the KV contents at each step (`tests/fakes.py`), the driver the
scheduler's invariants and, at the end, each answer against the request computed alone.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace

from scheduler.core.arrivals import RequestNeverFitsError
from scheduler.engine.queue_deadlines import QueueDeadlines
from scheduler.messages import FailureKind, SequenceStart, Submit
from tests.core.driver import Driver, make_config
from tests.fakes import FakeClock, make_submit

VOCAB_SIZE = 500
EOS_IDS = tuple(range(480, 499))
"""Several, so that they are met; prompts hold none."""
POISON_ID = 499

_PAUSE_RATE = 0.05
"""Share of the steps before which a reader falls behind."""
_STEP_S = 0.010
"""What a step takes, and then for each of its tokens:"""
_TOKEN_S = 0.0005


@dataclass(frozen=True)
class Caller:
    """One request and the times, in seconds, at which its caller sends it and gives up on it."""

    submit: Submit
    arrival_s: float
    patience_s: float
    queue_timeout_s: float = 1e9


@dataclass(frozen=True)
class Report:
    """What a run was like."""

    seed: int
    num_requests: int
    num_refused: int
    num_aborted: int
    num_failed: int
    num_expired: int
    num_pauses: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    num_tokens_computed: int
    num_tokens_useful: int
    """Known tokens of every admitted request, each counted once, less what the prefix cache gave."""
    num_cached_tokens: int
    elapsed_s: float
    """On the fake clock."""
    first_token_s_by_priority: dict[int, float] = field(hash=False)
    """Mean time from arrival to first token."""
    trace_sha256: str = ""


class Simulation:
    def __init__(self, seed: int, *, num_requests: int = 60, load: float = 1.0, fault_rate: float = 0.0) -> None:
        """`load` scales the rate of arrivals; 1.0 is a little more than the pool can serve without preemption.

        `fault_rate` is the share of steps that fail. Where any do, a tenth of the requests must begin alone, some
        failed steps are followed by a confinement to half of what was in them, and some by smaller steps.
        """
        self.seed = seed
        rng = random.Random(seed)
        block_size = rng.choice([2, 4, 8])
        num_slots = rng.randint(100, 240)
        max_num_seqs = rng.randint(3, 12)
        config = make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.randint(0, 30),
            max_model_len=90,
            block_size=block_size,
            num_kv_blocks=num_slots // block_size,
        )
        self.driver = Driver(config, vocab_size=VOCAB_SIZE, poison_token_id=POISON_ID)
        self.clock = FakeClock()
        self.callers = _draw_callers(rng, num_requests, load)
        self._fault_rate = fault_rate
        self._faults = random.Random(rng.getrandbits(64))
        if fault_rate:
            self.callers = [_draw_alone(self._faults, caller) for caller in self.callers]
        self._num_failed_steps = 0
        self._readers = random.Random(rng.getrandbits(64))
        self._paused: list[tuple[float, int]] = []
        """When each slow reader will have caught up."""
        self._num_pauses = 0
        self._deadlines = QueueDeadlines(self.driver.scheduler.has_run)
        self._num_expired = 0
        self._first_token_s: dict[int, float] = {}
        self._num_refused = 0
        self._trace = hashlib.sha256()

    def run(self) -> Report:
        """From the first arrival until everyone has an answer."""
        arrivals = sorted(self.callers, key=lambda caller: caller.arrival_s)
        given_up = sorted(self.callers, key=lambda caller: caller.arrival_s + caller.patience_s)
        while arrivals or self._paused or self.driver.scheduler.has_work:
            if not self.driver.scheduler.has_work:
                next_s = min([caller.arrival_s for caller in arrivals[:1]] + [until_s for until_s, _ in self._paused])
                self.clock.advance(max(0.0, next_s - self.clock()))
            self._admit(arrivals)
            self._pause_and_unpause()
            expired = self._deadlines.take_expired(self.clock())
            self._num_expired += len(expired)
            self.driver.expire(*expired)
            if self.driver.scheduler.has_work:
                self._step(given_up)
        self.driver.check_answers()
        return self._report()

    def _admit(self, arrivals: list[Caller]) -> None:
        while arrivals and arrivals[0].arrival_s <= self.clock():
            caller = arrivals.pop(0)
            try:
                self.driver.submit(caller.submit)
            except RequestNeverFitsError:
                self._num_refused += 1
            else:
                self._deadlines.add(caller.submit.request_id, caller.arrival_s + caller.queue_timeout_s)

    def _pause_and_unpause(self) -> None:
        caught_up = [request_id for until_s, request_id in self._paused if until_s <= self.clock()]
        self._paused = [entry for entry in self._paused if entry[0] > self.clock()]
        self.driver.unpause(*caught_up)
        live = [request_id for request_id, answer in self.driver.answers.items() if not answer.is_over]
        if live and self._readers.random() < _PAUSE_RATE:
            request_id = self._readers.choice(live)
            if request_id not in self.driver.paused:
                self.driver.pause(request_id)
                self._paused.append((self.clock() + self._readers.uniform(0.0, 0.5), request_id))
                self._num_pauses += 1

    def _step(self, given_up: list[Caller]) -> None:
        def while_in_flight() -> None:
            plan = self.driver.plans[-1]
            self.clock.advance(_STEP_S + _TOKEN_S * plan.num_batched_tokens)
            while given_up and given_up[0].arrival_s + given_up[0].patience_s <= self.clock():
                self.driver.abort(given_up.pop(0).submit.request_id)

        if self._faults.random() < self._fault_rate:
            self._fail_step()
        else:
            self.driver.step(while_in_flight)
        self._lift_confinement()
        self._trace.update(repr((self.driver.plans[-1], self.driver.scheduler.stats())).encode())
        for request_id, answer in self.driver.answers.items():
            told = [(sequence.token_ids, sequence.end) for sequence in answer.sequences.values()]
            self._trace.update(repr((request_id, told, answer.failure, answer.is_aborted)).encode())
            if any(sequence.token_ids for sequence in answer.sequences.values()):
                self._first_token_s.setdefault(request_id, self.clock())

    def _fail_step(self) -> None:
        self._num_failed_steps += 1
        in_step = self.driver.fail_step()
        self.clock.advance(_STEP_S)
        scheduler = self.driver.scheduler
        match self._faults.randrange(3):
            case 0 if self.driver.confined_to is None:
                self.driver.confine(in_step[: (len(in_step) + 1) // 2])
            case 1:
                num_seqs = max(1, scheduler.max_num_seqs // 2)
                scheduler.limit(
                    max_num_seqs=num_seqs, max_num_batched_tokens=max(num_seqs, scheduler.max_num_batched_tokens // 2)
                )

    def _lift_confinement(self) -> None:
        """At random, and when nobody else could run; so with the limits."""
        scheduler = self.driver.scheduler
        if self.driver.confined_to is not None and (not scheduler.has_work or self._faults.random() < 0.2):
            self.driver.unconfine()
        if scheduler.is_limited and self._faults.random() < 0.2:
            scheduler.limit(
                max_num_seqs=2 * scheduler.max_num_seqs, max_num_batched_tokens=2 * scheduler.max_num_batched_tokens
            )

    def _report(self) -> Report:
        answers = self.driver.answers
        stats = self.driver.scheduler.stats()
        waits: dict[int, list[float]] = {}
        for caller in self.callers:
            if caller.submit.request_id in self._first_token_s:
                wait_s = self._first_token_s[caller.submit.request_id] - caller.arrival_s
                waits.setdefault(caller.submit.priority, []).append(wait_s)
        admitted = {new.seq_id for plan in self.driver.plans for new in plan.new}
        return Report(
            seed=self.seed,
            num_requests=len(self.callers),
            num_refused=self._num_refused,
            num_aborted=sum(answer.is_aborted for answer in answers.values()),
            num_failed=sum(answer.failure is FailureKind.NON_FINITE for answer in answers.values()),
            num_expired=self._num_expired,
            num_pauses=self._num_pauses,
            num_steps=len(self.driver.plans),
            num_failed_steps=self._num_failed_steps,
            num_preemptions=stats.num_preemptions_total,
            num_tokens_computed=self.driver.runner.num_tokens_computed_total,
            num_tokens_useful=stats.num_prompt_tokens_total
            - stats.num_cached_tokens_total
            + sum(len(one.token_ids) for answer in answers.values() for one in answer.sequences.values())
            - len(admitted),
            num_cached_tokens=stats.num_cached_tokens_total,
            elapsed_s=self.clock(),
            first_token_s_by_priority={
                priority: sum(waits_s) / len(waits_s) for priority, waits_s in sorted(waits.items())
            },
            trace_sha256=self._trace.hexdigest(),
        )


def _draw_callers(rng: random.Random, num_requests: int, load: float) -> list[Caller]:
    system_prompts = [[rng.randrange(EOS_IDS[0]) for _ in range(30)] for _ in range(3)]
    callers = []
    arrival_s = 0.0
    for request_id in range(1, num_requests + 1):
        arrival_s += rng.expovariate(load * 12.0)
        prompt = rng.choice(system_prompts)[: rng.randint(0, 30)]
        prompt = prompt + [rng.randrange(EOS_IDS[0]) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.04:
            prompt[rng.randrange(len(prompt))] = POISON_ID
        submit = make_submit(
            request_id,
            prompt,
            max_tokens=rng.randint(1, 40),
            min_tokens=rng.choice([0, 0, 5]),
            eos_token_ids=rng.choice([(), EOS_IDS]),
            priority=rng.choice([0, 0, 0, 0, 10, -10]),
            cache_salt=rng.choice(["", "", "", "tenant"]),
            cache_bypass=rng.random() < 0.1,
        )
        num_sequences = rng.choice([1, 1, 1, 1, 1, 1, 2, 4])
        submit = replace(submit, sequences=tuple(SequenceStart(index) for index in range(num_sequences)))
        patience_s = rng.uniform(0.0, 1.0) if rng.random() < 0.15 else 1e9
        queue_timeout_s = rng.uniform(0.0, 1.0) if rng.random() < 0.15 else 1e9
        callers.append(Caller(submit, arrival_s, patience_s, queue_timeout_s))
    return callers


def _draw_alone(rng: random.Random, caller: Caller) -> Caller:
    if rng.random() >= 0.1:
        return caller
    return replace(caller, submit=replace(caller.submit, alone_until=rng.choice([1, 2, 10])))
