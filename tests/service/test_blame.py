"""Suspicion and proof; and a simulated server in which a poison is sent again and again."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import (
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    SequenceOutput,
    SequenceStart,
    StoppingParams,
    Submit,
)
from service.blame import LEFT_TTL_S, Blame, Suspect, Verdicts, _Memory
from service.journal import JournalEntry

SALT = b"s" * 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def blame(clock: Clock) -> Blame:
    return Blame(clock, SALT)


_numbers = iter(range(1, 10**9))


def submit(*prompt: int, alone_until: int = 0, resume: tuple[int, ...] = (), **sampling: object) -> Submit:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    sequences = (SequenceStart(0, resume),)
    return Submit(next(_numbers), prompt, params, StoppingParams(100), sequences, alone_until=alone_until)


def in_step(request: Submit, num_outputs: int) -> Suspect:
    """A request of one sequence in a dying step."""
    return Suspect(request, num_outputs, was_alone=num_outputs < request.alone_until)


def sent(blame: Blame, *prompt: int, engine: int = 0) -> Submit:
    """A copy as it leaves: with the place it must run alone to."""
    request = submit(*prompt)
    request = dataclasses.replace(request, alone_until=blame.alone_until(request))
    blame.on_sent(request, engine)
    return request


# The fingerprint


def test_a_fingerprint_is_the_same_for_the_like_of_a_request(blame: Blame) -> None:
    """Number, seed, resumed tokens, priority and salt of the cache do not matter."""
    one = submit(1, 2, 3, temperature=0.5, seed=1)
    other = submit(1, 2, 3, temperature=0.5, seed=2, resume=(4, 5), alone_until=3)
    other = dataclasses.replace(other, priority=7, cache_salt="x")
    assert blame.fingerprint(one) == blame.fingerprint(other)


@pytest.mark.parametrize(
    "other",
    [
        Submit(1, (1, 2, 4), SamplingParams(), StoppingParams(100)),
        Submit(1, (1, 2), SamplingParams(), StoppingParams(100)),
        *(
            Submit(1, (1, 2, 3), SamplingParams(**{name: value}), StoppingParams(100))
            for name, value in {
                "temperature": 0.5,
                "top_p": 0.5,
                "top_k": 3,
                "min_p": 0.5,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.5,
                "logit_bias": ((1, 1.0),),
                "allowed_token_ids": (1, 2),
                "num_logprobs": 0,
            }.items()
        ),
        Submit(1, (1, 2, 3), SamplingParams(), StoppingParams(101)),
        Submit(1, (1, 2, 3), SamplingParams(), StoppingParams(100, min_tokens=1)),
        Submit(1, (1, 2, 3), SamplingParams(), StoppingParams(100, eos_token_ids=(3,))),
        Submit(1, (1, 2, 3), SamplingParams(), StoppingParams(100, stop_token_ids=(3,))),
        Submit(1, (1, 2, 3), SamplingParams(), StoppingParams(100), guide=b"{}"),
    ],
)
def test_a_fingerprint_tells_apart_whatever_an_engine_computes_by(blame: Blame, other: Submit) -> None:
    """The prompt and each value of sampling and stopping."""
    assert blame.fingerprint(submit(1, 2, 3)) != blame.fingerprint(other)


def test_every_attempt_of_a_request_has_its_fingerprint(blame: Blame) -> None:
    """Also the one that is sent once the prompt's logprobs are told, of the sequences that have not finished."""
    request = dataclasses.replace(
        submit(1, 2, 3, num_prompt_logprobs=0), sequences=(SequenceStart(0), SequenceStart(1))
    )
    entry = JournalEntry(request)
    scores = PromptLogprobs(0, b"", b"", b"", b"")
    entry.record(SequenceOutput(request.request_id, 0, (7,), prompt_logprobs=scores))
    entry.record(SequenceOutput(request.request_id, 1, (8,), finish_reason=FinishReason.EOS))
    attempt = entry.next_attempt(alone_until=2)
    assert attempt.sampling != request.sampling
    assert blame.fingerprint(attempt) == blame.fingerprint(request)


def test_every_sampling_value_is_in_the_fingerprint_or_changes_between_attempts() -> None:
    """A new field of SamplingParams or StoppingParams must be put into a test above; it is in the digest anyway."""
    assert len(dataclasses.fields(SamplingParams)) == 12
    assert len(dataclasses.fields(StoppingParams)) == 4


def test_a_fingerprint_tells_nothing_without_the_salt(clock: Clock) -> None:
    """Two processes give the same request different ones."""
    request = submit(1, 2, 3)
    assert Blame(clock, b"a" * 16).fingerprint(request) != Blame(clock, b"b" * 16).fingerprint(request)


def test_nothing_of_a_prompt_is_kept(clock: Clock, blame: Blame) -> None:
    """Whatever happened, no Submit and no token id is in the memory: everything in it is a digest or a number."""
    secret = submit(77_777_777, alone_until=5)
    blame.on_death(0, [in_step(secret, 3)])
    blame.on_left(in_step(secret, 3))
    blame.on_death(0, [in_step(secret, 3)])
    assert blame.is_poison(secret)
    memories = [memory for memory in vars(blame).values() if isinstance(memory, _Memory)]
    assert len(memories) == 4
    kept = pickle.dumps([list(memory._entries.items()) for memory in memories])
    assert b"Submit" not in kept
    assert pickle.dumps(77_777_777)[2:-1] not in kept
    assert not any(isinstance(value, Submit) for value in vars(blame).values())


# Suspicion


def test_an_unknown_request_is_free(blame: Blame) -> None:
    """Before any death nothing is held against anyone."""
    request = submit(1)
    assert (blame.alone_until(request), blame.is_poison(request), blame.trial_engine(request)) == (0, False, None)


def test_all_in_a_dying_step_are_suspects(blame: Blame) -> None:
    """Each must run alone until it is one token beyond what it had, and no other fingerprint must."""
    one, two = submit(1), submit(2, resume=(9, 9))
    verdicts = blame.on_death(0, [in_step(one, 0), in_step(two, 7)])
    assert verdicts == Verdicts(None, (one.request_id, two.request_id))
    assert blame.alone_until(submit(1)) == 1
    assert blame.alone_until(submit(2)) == 8
    assert blame.alone_until(submit(3)) == 0
    assert not blame.is_poison(one)
    assert not blame.is_poison(two)


def test_the_only_one_in_a_dying_step_is_a_suspect_not_a_killer(blame: Blame) -> None:
    """It was alone by chance: anybody may have sent the signal."""
    request = submit(1)
    assert blame.on_death(0, [in_step(request, 5)]) == Verdicts(None, (request.request_id,))
    assert not blame.is_poison(request)


def test_a_suspect_that_dies_alone_is_the_killer(blame: Blame) -> None:
    """It is refused, whoever sends it; the others are not."""
    blame.on_death(0, [in_step(submit(1), 5), in_step(submit(2), 5)])
    suspect = sent(blame, 1)
    assert suspect.alone_until == 6
    assert blame.on_death(0, [in_step(suspect, 5)]) == Verdicts(suspect.request_id, ())
    assert blame.is_poison(submit(1, seed=12345))
    assert not blame.is_poison(submit(2))


def test_a_suspect_may_die_anywhere_before_its_place(blame: Blame) -> None:
    """Sent from its beginning, without what it had: alone it is all the way."""
    blame.on_death(0, [in_step(submit(1), 50)])
    suspect = sent(blame, 1)
    assert blame.on_death(0, [in_step(suspect, 0)]).killer_id == suspect.request_id


def test_past_its_place_a_suspect_is_beside_others_again(blame: Blame) -> None:
    """If it dies there, though nobody had counted it cleared, that proves nothing."""
    blame.on_death(0, [in_step(submit(1), 5)])
    suspect = sent(blame, 1)
    assert blame.on_death(0, [in_step(suspect, 6)]).killer_id is None
    assert not blame.is_poison(suspect)


@pytest.mark.parametrize("is_other_known", [True, False])
def test_a_suspect_that_was_not_alone_after_all_is_no_killer(blame: Blame, is_other_known: bool) -> None:
    """By the count of the front end it was before its place; another request in the step, known or not, says that the
    engine had it further."""
    blame.on_death(0, [in_step(submit(1), 5)])
    suspect, other = sent(blame, 1), submit(2)
    step = [in_step(suspect, 5), in_step(other, 1)][: 1 + is_other_known]
    verdicts = blame.on_death(0, step, [] if is_other_known else [other.request_id])
    assert verdicts.killer_id is None
    assert suspect.request_id in verdicts.suspect_ids
    assert not blame.is_poison(suspect)


def test_an_innocent_beside_others_is_never_a_killer(blame: Blame) -> None:
    """However many steps it was in that died: by accident, cleared in between or not."""
    for round_number in range(5):
        innocent = submit(1)
        verdicts = blame.on_death(0, [in_step(innocent, 3), in_step(submit(2, round_number), 3)])
        assert verdicts.killer_id is None
        if round_number % 2:
            blame.cleared(dataclasses.replace(innocent, alone_until=blame.alone_until(innocent)))
        assert not blame.is_poison(innocent)


def test_a_cleared_suspect_is_free(blame: Blame) -> None:
    """Past its place it is sent like any other, and its next death makes it a suspect, not a killer."""
    blame.on_death(0, [in_step(submit(1), 5)])
    suspect = sent(blame, 1)
    blame.cleared(suspect)
    assert blame.alone_until(submit(1)) == 0
    assert blame.trial_engine(submit(1)) is None
    assert blame.on_death(0, [in_step(submit(1), 40)]).killer_id is None


def test_a_copy_that_another_copy_has_cleared_is_no_killer(blame: Blame) -> None:
    """What one survived is no proof against the other, which was sent before that was known."""
    blame.on_death(0, [in_step(submit(1), 5)])
    first, second = sent(blame, 1), sent(blame, 1)
    blame.cleared(first)
    assert blame.on_death(0, [in_step(second, 5)]).killer_id is None
    assert blame.alone_until(second) > 0


def test_a_copy_past_an_early_place_does_not_clear_a_later_one(blame: Blame) -> None:
    """Sent to run alone to token 6, it says nothing about a death at token 50."""
    blame.on_death(0, [in_step(submit(1), 5)])
    early = sent(blame, 1)
    blame.on_death(1, [in_step(submit(1), 50), in_step(submit(2), 1)])
    blame.cleared(early)
    assert blame.alone_until(early) > 50


def test_a_replayed_copy_has_its_own_place_to_get_past(blame: Blame) -> None:
    """Of many streams with one prompt each was somewhere else when the engine died: what goes on where it was needs to
    be alone for one token; who begins anew, until it is where the furthest was."""
    early, late = submit(1), submit(1)
    blame.on_death(0, [in_step(early, 50), in_step(late, 200), in_step(submit(2), 1)])
    assert blame.alone_until(early) == 51
    assert blame.alone_until(late) == 201
    assert blame.alone_until(submit(1)) == 201
    replayed = dataclasses.replace(early, alone_until=51)
    blame.on_sent(replayed, 0)
    blame.cleared(replayed)
    assert blame.alone_until(submit(1)) == 201
    blame.cleared(dataclasses.replace(late, alone_until=201))
    assert blame.alone_until(submit(1)) == blame.alone_until(early) == 0


def test_a_copy_at_its_own_place_is_proof(blame: Blame) -> None:
    """Dying there alone, it is the killer, though another copy was further."""
    early, late = submit(1), submit(1)
    blame.on_death(0, [in_step(early, 50), in_step(late, 200)])
    replayed = dataclasses.replace(early, alone_until=51)
    assert blame.on_death(0, [in_step(replayed, 50)]).killer_id == early.request_id


def test_who_was_never_suspected_clears_nothing(blame: Blame) -> None:
    """A copy that was running beside others all along is no witness."""
    unsuspected = submit(1)
    blame.on_death(0, [in_step(submit(1), 5)])
    blame.cleared(unsuspected)
    assert blame.alone_until(unsuspected) == 6


def test_the_place_moves_further_out_with_each_death(blame: Blame) -> None:
    """A poison whose place wanders, or is counted late, is alone there sooner or later; copies in one step count as
    one."""
    places = []
    for _ in range(6):
        blame.on_death(0, [in_step(submit(1), 10), in_step(submit(1), 7)])
        places.append(blame.alone_until(submit(1)))
        blame.cleared(dataclasses.replace(submit(1), alone_until=places[-1]))
    assert places == [11, 12, 14, 18, 18, 18]


# Trials


def test_copies_of_a_suspect_follow_the_first_one(blame: Blame) -> None:
    """From the moment it is sent until its outcome is known, also when its caller leaves; others go where they like."""
    blame.on_death(0, [in_step(submit(1), 5)])
    assert blame.trial_engine(submit(1)) is None
    trial = sent(blame, 1, engine=2)
    assert blame.trial_engine(submit(1)) == 2
    assert blame.trial_engine(submit(2)) is None
    blame.on_left(in_step(trial, 0))
    blame.on_death(1, [])
    assert blame.trial_engine(submit(1)) == 2
    blame.on_death(2, [])
    assert blame.trial_engine(submit(1)) is None


def test_leaving_does_not_go_free(clock: Clock, blame: Blame) -> None:
    """A caller with a deadline shorter than the hang watch's is gone when its engine is killed: its request is a
    suspect all the same, and at its second death the killer."""
    poison = submit(1)
    blame.on_left(in_step(poison, 3))
    clock.now_s += 10
    assert blame.on_death(0, [], [poison.request_id, 10**9]) == Verdicts(None, (poison.request_id,))
    again = sent(blame, 1)
    assert again.alone_until == 4
    blame.on_left(in_step(again, 3))
    clock.now_s += 10
    assert blame.on_death(0, [], [again.request_id]) == Verdicts(again.request_id, ())
    assert blame.is_poison(submit(1))


def test_a_death_of_strangers_accuses_nobody(blame: Blame) -> None:
    """An idle engine's death, and numbers nobody knows."""
    assert blame.on_death(0, []) == Verdicts()
    assert blame.on_death(0, [], [10**9]) == Verdicts()


def test_what_is_in_a_stalled_step_is_a_suspect_before_the_death(blame: Blame) -> None:
    """A copy sent while the first one's engine hangs runs alone, and its own death is proof; the stalled engine's is
    not. If the engine goes on, the copy gets through and nothing is left."""
    hung, innocent = submit(1), submit(2)
    blame.on_left(in_step(hung, 3))
    blame.on_stall([in_step(innocent, 7)], [hung.request_id])
    copy, other = sent(blame, 1, engine=1), sent(blame, 2, engine=1)
    assert (copy.alone_until, other.alone_until) == (4, 8)
    blame.cleared(other)
    assert blame.alone_until(innocent) == 0
    assert blame.on_death(0, [in_step(innocent, 7)], [hung.request_id]).killer_id is None
    assert blame.on_death(1, [in_step(copy, 3)]).killer_id == copy.request_id


# The memory


def test_suspicion_and_refusal_end(clock: Clock) -> None:
    """A suspect is forgotten after its time; a poison is then a suspect, whose very next death is proof again."""
    blame = Blame(clock, SALT, poison_ttl_s=100, suspect_ttl_s=50)
    blame.on_death(0, [in_step(submit(1), 5)])
    clock.now_s += 49
    assert blame.alone_until(submit(1)) == 6
    clock.now_s += 1
    assert blame.alone_until(submit(1)) == 0
    blame.on_death(0, [in_step(submit(1), 5)])
    blame.on_death(0, [in_step(sent(blame, 1), 5)])
    clock.now_s += 99
    assert blame.is_poison(submit(1))
    clock.now_s += 1
    assert not blame.is_poison(submit(1))
    again = sent(blame, 1)
    assert again.alone_until > 5
    assert blame.on_death(0, [in_step(again, 5)]).killer_id == again.request_id
    assert blame.is_poison(submit(1))


def test_being_refused_does_not_prolong_it(clock: Clock) -> None:
    """A client that retries for ever is let in again when the time is over."""
    blame = Blame(clock, SALT, poison_ttl_s=100)
    blame.on_death(0, [in_step(submit(1), 5)])
    blame.on_death(0, [in_step(sent(blame, 1), 5)])
    for _ in range(99):
        clock.now_s += 1
        assert blame.is_poison(submit(1))
    clock.now_s += 1
    assert not blame.is_poison(submit(1))


def test_what_a_caller_left_is_forgotten(clock: Clock, blame: Blame) -> None:
    """Long after, the engine is not computing it any more."""
    poison = submit(1)
    blame.on_left(in_step(poison, 3))
    clock.now_s += LEFT_TTL_S
    assert blame.on_death(0, [], [poison.request_id]) == Verdicts()


def test_the_memory_is_bounded_and_keeps_what_is_asked_for(clock: Clock) -> None:
    """The fingerprint not seen for the longest goes first; a suspect sent before still convicts itself."""
    blame = Blame(clock, SALT, capacity=10)
    blame.on_death(0, [in_step(submit(1), 5)])
    blame.on_death(0, [in_step(submit(2), 5)])
    pushed_out = sent(blame, 2)
    for n in range(100, 200):
        blame.on_death(0, [in_step(submit(n), 5)])
        assert blame.alone_until(submit(1)) == 6
        assert len(blame._records) <= 10
        blame.on_left(in_step(submit(n), 1))
        assert len(blame._left) <= 10
    assert blame.alone_until(submit(2)) == 0
    assert blame.on_death(0, [in_step(pushed_out, 5)]).killer_id == pushed_out.request_id
    for n in range(300, 400):
        blame.on_death(0, [in_step(submit(n), 0)])
        blame.on_death(0, [in_step(sent(blame, n), 0)])
        assert len(blame._poisons) <= 10
    assert blame.is_poison(submit(399))


def test_without_a_memory_no_digest_is_made(clock: Clock, blame: Blame, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without deaths pays nothing, and neither does one whose last death is long ago."""
    blame.on_death(0, [in_step(submit(1), 5)])
    blame.on_death(0, [in_step(sent(blame, 1), 5)])
    clock.now_s += 10**6

    def forbidden(_: object) -> bytes:
        pytest.fail("a digest was made")

    monkeypatch.setattr(blame, "fingerprint", forbidden)
    request = submit(1)
    assert (blame.alone_until(request), blame.is_poison(request), blame.trial_engine(request)) == (0, False, None)
    blame.on_sent(request, 0)


# A server in small: engines whose steps are made one by one, a front end that may be late with its deaths


@dataclass
class Stream:
    prompt: tuple[int, ...]
    has_replay: bool
    request_id: int = field(default_factory=lambda: next(_numbers))
    submit: Submit | None = None
    num_outputs: int = 0
    num_attempts: int = 0
    fate: str = ""


@dataclass
class Engine:
    index: int
    running: list[Stream] = field(default_factory=list)
    dying_step: list[Stream] | None = None
    """Set at its death, until that is handled."""

    def step(self, poison_at: int) -> None:
        """Everyone gets one token, or one suspect alone does; a poison at its place takes the engine with it."""
        if self.dying_step is not None or not self.running:
            return
        alone = [s for s in self.running if s.submit is not None and s.submit.alone_until > s.num_outputs]
        batch = alone[:1] or self.running
        if any(s.prompt == POISON and s.num_outputs == poison_at for s in batch):
            self.dying_step = list(batch)
            return
        for stream in batch:
            stream.num_outputs += 1


POISON = (6, 6, 6)
NUM_TOKENS = 12


class Server:
    """The front end's part: what the real one does with a Blame."""

    def __init__(self, num_engines: int, poison_at: int) -> None:
        self.blame = Blame(Clock(), SALT)
        self.engines = [Engine(index) for index in range(num_engines)]
        self.poison_at = poison_at
        self.num_deaths = 0
        self.num_sent = 0

    def send(self, stream: Stream) -> None:
        request = dataclasses.replace(submit(*stream.prompt), request_id=stream.request_id)
        if self.blame.is_poison(request):
            stream.fate = "poison"
            return
        trial = self.blame.trial_engine(request)
        engine = self.engines[self.num_sent % len(self.engines) if trial is None else trial]
        stream.num_attempts += 1
        self.num_sent += 1
        stream.num_outputs *= stream.has_replay
        stream.submit = dataclasses.replace(request, alone_until=self.blame.alone_until(request))
        self.blame.on_sent(stream.submit, engine.index)
        engine.running.append(stream)

    def step(self) -> None:
        for engine in self.engines:
            engine.step(self.poison_at)
            for stream in [] if engine.dying_step is not None else list(engine.running):
                assert stream.submit is not None
                if 0 < stream.submit.alone_until <= stream.num_outputs:
                    self.blame.cleared(stream.submit)
                if stream.num_outputs >= NUM_TOKENS:
                    stream.fate = "finished"
                    engine.running.remove(stream)

    def leave(self, stream: Stream) -> None:
        """The caller goes, the engine hears of it after the step it is in; a dead one never does."""
        for engine in self.engines:
            if stream in engine.running:
                assert stream.submit is not None
                self.blame.on_left(in_step(stream.submit, stream.num_outputs))
                stream.fate = "left"
                engine.running.remove(stream)

    def handle_death(self, engine: Engine) -> None:
        step, engine.dying_step = engine.dying_step, None
        streams, engine.running = engine.running, []
        assert step is not None
        self.num_deaths += 1
        here = [s for s in step if s in streams]
        gone = [s for s in step if s not in streams]
        verdicts = self.blame.on_death(
            engine.index,
            [in_step(s.submit, s.num_outputs) for s in here if s.submit is not None],
            [s.submit.request_id for s in gone if s.submit is not None],
        )
        for stream in streams:
            assert stream.submit is not None
            if stream.submit.request_id == verdicts.killer_id:
                stream.fate = "killer"
            elif stream.has_replay or stream not in step:
                self.send(stream)
            else:
                stream.fate = "in step"

    @property
    def dead(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.dying_step is not None]


class Story:
    """What happens in which order, drawn by hypothesis."""

    def __init__(self, data: st.DataObject, server: Server) -> None:
        self.data = data
        self.server = server
        self.is_first_at_once = len(server.engines) > 1
        """Before that death is handled, another engine may be given an unsuspected copy: a death of its own."""

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.server.step()
            for engine in list(self.server.dead):
                is_at_once = self.is_first_at_once and not self.server.num_deaths
                if is_at_once or self.data.draw(st.booleans(), label="the death is handled now"):
                    self.server.handle_death(engine)

    def settle(self) -> None:
        for _ in range(40 * NUM_TOKENS):
            self.server.step()
            for engine in list(self.server.dead):
                self.server.handle_death(engine)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@given(data=st.data(), poison_at=st.integers(0, 10), has_replay=st.booleans())
def test_a_poison_sent_again_after_each_end_has_two_deaths(
    num_engines: int, data: st.DataObject, poison_at: int, has_replay: bool
) -> None:
    """Five resubmissions, each after the one before has ended (or its caller has left it in the middle), deaths handled
    late or at once (with several engines the first at once), with and without replay: two deaths at most; innocents are
    never called killers, and with replay they finish."""
    server = Server(num_engines, poison_at)
    story = Story(data, server)
    innocents = [Stream((n,), has_replay) for n in range(6)]
    for innocent in innocents:
        server.send(innocent)
    for _ in range(6):
        poison = Stream(POISON, has_replay)
        server.send(poison)
        story.go_on(data.draw(st.integers(0, 14), label="steps"))
        if data.draw(st.booleans(), label="the caller leaves") and not poison.fate:
            server.leave(poison)
        else:
            story.settle()
            assert poison.fate in {"poison", "killer", "in step"}
        late = Stream((100 + len(innocents),), has_replay)
        innocents.append(late)
        server.send(late)
    story.settle()
    assert server.num_deaths <= 2
    assert {innocent.fate for innocent in innocents} <= {"finished"} | ({"in step"} - {"in step" * has_replay})


@given(data=st.data(), poison_at=st.integers(0, 10), has_replay=st.booleans(), count=st.integers(2, 6))
def test_poisons_sent_at_once_have_two_deaths(
    data: st.DataObject, poison_at: int, has_replay: bool, count: int
) -> None:
    """Several copies in one engine, sent together or one by one while the others run."""
    server = Server(1, poison_at)
    story = Story(data, server)
    innocents = [Stream((n,), has_replay) for n in range(4)]
    for innocent in innocents:
        server.send(innocent)
    poisons = [Stream(POISON, has_replay) for _ in range(count)]
    for poison in poisons:
        server.send(poison)
        story.go_on(data.draw(st.integers(0, 3), label="steps"))
    story.settle()
    again = Stream(POISON, has_replay)
    server.send(again)
    story.settle()
    assert server.num_deaths <= 2
    assert all(poison.fate for poison in [*poisons, again])
    assert {innocent.fate for innocent in innocents} <= {"finished"} | ({"in step"} - {"in step" * has_replay})


@given(data=st.data(), poison_at=st.integers(0, 10))
def test_a_suspect_sent_at_once_to_many_engines_has_one_more_death(data: st.DataObject, poison_at: int) -> None:
    """Known as a suspect, its copies stay together: however many come while the outcome is open, one engine dies."""
    server = Server(3, poison_at)
    story = Story(data, server)
    first = Stream(POISON, has_replay=False)
    server.send(first)
    story.settle()
    assert (first.fate, server.num_deaths) == ("in step", 1)
    poisons = [Stream(POISON, has_replay=data.draw(st.booleans())) for _ in range(5)]
    for poison in poisons:
        server.send(poison)
        story.go_on(data.draw(st.integers(0, 4), label="steps"))
    story.settle()
    assert server.num_deaths == 2
    assert sorted({poison.fate for poison in poisons}) in (["killer"], ["killer", "poison"])
