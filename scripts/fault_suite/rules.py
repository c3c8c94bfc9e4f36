"""The model of what is allowed. Pure: histories in, violations out; the tests hand it made-up ones.

Whatever happens to the engine, a client may see this and nothing else:

- The messages of a call are one unbroken answer: `prompt` on the first alone, one `finish`, `usage` on the last, as
  many tokens as `usage` says, no more than were asked for; a call that ends OK has a finish.
- An answer, whole or cut off, is the answer that an undisturbed server gives, or the beginning of it. Where it departs
  from that at a near-tie of two tokens (floating point), it is not judged here but handed on, as `Departure`.
- A call ends: OK; by its own client's cancel; refused before anything was sent, soon, in the time of a fault, and told
  when to come back; with `fail`, UNAVAILABLE ENGINE_DEAD with the id of a death that is in the log; INTERNAL, if it is
  the poison, or is the one stream that a fault spoils. With `replay`, a stream that was there before the fault has no
  other end than OK.
- A fault that kills twice may convict one request for each death after the first: that which was being tried alone when
  it came. It and its like are told POISON_REQUEST from then on; they are counted apart. With `fail` it is its caller
  who sends it again, after it was told that it may have been the killer; then the next fault may convict it.
- It ends. A call that is open when the run is over has hung.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.fault_suite.history import Answer, Call, Episode, Status

REFUSAL_SLACK_S = 0.5
"""A call sent just before a fault may reach the server just after it; one sent as a probe sees it serve again may be
told what was true a moment ago."""
REFUSAL_LIMIT_S = 2.0
"""A refusal is an answer at once. On two busy cores that is not nothing; a call that was kept and then dropped took as
long as the fault."""
REFUSALS = frozenset({"UNAVAILABLE ENGINE_STARTING", "UNAVAILABLE ENGINE_DEAD"})
SPOILED = frozenset({"INTERNAL INTERNAL", "INTERNAL STEP_FAILED", "INTERNAL POISON_REQUEST"})
POISON_ENDS = SPOILED | {"UNAVAILABLE ENGINE_DEAD"}
RECOVERY_LIMIT_S = 90.0
"""From a fault to a probe that is served: a hang's deadline, a whole start on busy cores, a second try at it."""
RUN_OF_TOKENS = 4
"""So many equal tokens at a shifted place tell tokens lost or repeated from tokens changed."""

KINDS = ("HUNG", "LOST", "REPEATED", "CHANGED", "MALFORMED", "BAD END", "RECORD", "LEAKED", "STRAY", "HEALTH", "EXIT")


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that was not allowed."""

    kind: str
    """One of KINDS."""
    detail: str


@dataclass(frozen=True, slots=True)
class Departure:
    """A call whose tokens differ from the answer's from `position` on, in a way that may be a near-tie."""

    call: Call
    answer: Answer
    position: int


@dataclass(frozen=True, slots=True)
class Mode:
    """How the server was told to treat streams of a dead engine."""

    replays: bool


@dataclass(slots=True)
class Verdict:
    """Of all calls of a run."""

    violations: list[Violation]
    departures: list[Departure]
    num_exact: int = 0
    """Calls that ended OK with the very answer."""
    num_cut: int = 0
    """Cut off by a cancel or a death that `fail` lets through; what they had was right."""
    num_refused: int = 0
    num_convicted: int = 0
    """Innocent requests that a second death of one fault made look like killers."""
    ends: Counter[str] | None = None


def judge(calls: Iterable[Call], answers: Mapping[int, Answer], episodes: Sequence[Episode], mode: Mode) -> Verdict:
    """All rules, over all calls of one run."""
    verdict = Verdict([], [], ends=Counter())
    spoiled: Counter[int] = Counter()
    calls = list(calls)
    convicted = _convicted(calls, episodes, mode)
    verdict.num_convicted = len(convicted)
    assert verdict.ends is not None
    for call in calls:
        verdict.ends["left" if call.left_s is not None else call.status.name if call.status else "open"] += 1
        verdict.violations += shape_faults(call)
        end = end_fault(call, episodes, mode)
        if end is not None and not _is_convicted(call, convicted):
            place = _spoiling_episode(call, episodes) if end.kind == "BAD END" else None
            if place is None:
                verdict.violations.append(end)
            else:
                spoiled[place] += 1
        answer = answers.get(call.ask.number)
        if answer is not None:
            verdict.violations += _content(call, answer, verdict)
    verdict.violations += [
        Violation("BAD END", f"{episodes[place].fault}: {count} streams ended INTERNAL")
        for place, count in spoiled.items()
        if count > episodes[place].num_spoiled_max
    ]
    return verdict


def _convicted(calls: Sequence[Call], episodes: Sequence[Episode], mode: Mode) -> dict[int, float]:
    """Asks that were convicted by faults that may: when each was first told so."""
    suspected: dict[int, float] = {}  # with `fail`: when each was first told that it may have been the killer
    first: dict[int, float] = {}
    for call in calls:
        if call.status is not None and call.status.reason == "POISON_REQUEST" and not call.ask.is_poison:
            number = call.ask.number
            first[number] = min(first.get(number, float("inf")), call.ended_s or float("inf"))
        if not mode.replays and call.status is not None and call.status.pushback_ms == -1:
            number = call.ask.number
            suspected[number] = min(suspected.get(number, float("inf")), call.ended_s or float("inf"))
    allowed = {number: at_s for number, at_s in first.items() if suspected.get(number, float("inf")) < at_s}
    for episode in episodes:
        until_s = episode.recovered_s + REFUSAL_SLACK_S
        some = sorted((at_s, number) for number, at_s in first.items() if episode.began_s <= at_s <= until_s)
        allowed |= {number: at_s for at_s, number in some[: episode.num_convicted_max]}
    return allowed


def _is_convicted(call: Call, convicted: Mapping[int, float]) -> bool:
    """It, or its like, was told so, and this is what it is told from then on."""
    status = call.status
    if status is None or status.name != "INTERNAL POISON_REQUEST" or status.pushback_ms != -1:
        return False
    return call.ended_s is not None and convicted.get(call.ask.number, float("inf")) <= call.ended_s


def shape_faults(call: Call) -> Iterator[Violation]:
    """What is wrong with the sequence of messages, whatever is in them."""
    messages = call.messages
    if call.ended_s is None:
        yield Violation("HUNG", f"{_name(call)} is open with {len(call.token_ids)} tokens")
    places = [place for place, message in enumerate(messages) if message.has_prompt]
    if places != [0][: len(messages)]:
        yield Violation("MALFORMED", f"{_name(call)} has `prompt` on messages {places}")
    finishes = [place for place, message in enumerate(messages) if message.finish_reason]
    if len(finishes) > 1:
        yield Violation("REPEATED", f"{_name(call)} finished {len(finishes)} times")
    if any(message.index for message in messages):
        yield Violation("MALFORMED", f"{_name(call)} has a sequence that nobody asked for")
    if len(call.token_ids) > call.ask.max_tokens:
        yield Violation("REPEATED", f"{_name(call)} has {len(call.token_ids)} tokens of {call.ask.max_tokens}")
    if call.status is None or call.status.code != "OK":
        return
    if finishes != [len(messages) - 1] or not messages:
        yield Violation("LOST", f"{_name(call)} ended OK, its finish is at {finishes} of {len(messages)} messages")
    elif messages[-1].usage_completion is None:
        yield Violation("LOST", f"{_name(call)} ended OK without usage")
    elif messages[-1].usage_completion != len(call.token_ids):
        kind = "LOST" if messages[-1].usage_completion > len(call.token_ids) else "REPEATED"
        detail = f"{_name(call)} has {len(call.token_ids)} tokens, its usage says {messages[-1].usage_completion}"
        yield Violation(kind, detail)
    elif call.finish_reason == "MAX_TOKENS" and len(call.token_ids) != call.ask.max_tokens:
        yield Violation("LOST", f"{_name(call)} ended at {len(call.token_ids)} of {call.ask.max_tokens} tokens")


def end_fault(call: Call, episodes: Sequence[Episode], mode: Mode) -> Violation | None:
    """Why the call may not have ended so; None if it may, or if it has not."""
    status = call.status
    if status is None or status.code == "OK" or call.left_s is not None:
        return None
    if call.ask.is_poison and status.name in POISON_ENDS:
        return _pushback_fault(call, status)
    near = [e for e in episodes if e.began_s - REFUSAL_SLACK_S <= call.sent_s <= e.recovered_s + REFUSAL_SLACK_S]
    assert call.ended_s is not None
    if call.is_refusal and status.name in REFUSALS and near:
        waited_s = call.ended_s - call.sent_s
        if waited_s <= REFUSAL_LIMIT_S:
            return _death_id_fault(call, status, episodes)
        if mode.replays:
            return Violation("BAD END", f"{_name(call)} was refused only after {waited_s:.2f} s")
    if not mode.replays and status.name == "UNAVAILABLE ENGINE_DEAD":
        during = [e for e in episodes if call.sent_s <= e.recovered_s + REFUSAL_SLACK_S and e.began_s <= call.ended_s]
        if during:
            return _death_id_fault(call, status, episodes) or _pushback_fault(call, status)
    had = f"{len(call.token_ids)} tokens"
    return Violation("BAD END", f"{_name(call)} ended {status.name} ({status.message}) with {had}")


def _death_id_fault(call: Call, status: Status, episodes: Sequence[Episode]) -> Violation | None:
    if status.reason != "ENGINE_DEAD":
        return None
    if any(status.death_id in episode.death_ids for episode in episodes):
        return None
    return Violation("RECORD", f"{_name(call)} was told of a death {status.death_id!r} that no record has")


def _pushback_fault(call: Call, status: Status) -> Violation | None:
    if status.pushback_ms is None:
        return Violation("BAD END", f"{_name(call)} ended {status.name} without a pushback")
    if status.code == "INTERNAL" and status.pushback_ms >= 0:
        return Violation("BAD END", f"{_name(call)} is the culprit and was told to come back")
    return None


def _spoiling_episode(call: Call, episodes: Sequence[Episode]) -> int | None:
    """Which fault may have spoiled this one stream."""
    if call.status is None or call.status.name not in SPOILED:
        return None
    assert call.ended_s is not None
    return next(
        (
            place
            for place, episode in enumerate(episodes)
            if episode.num_spoiled_max and episode.began_s <= call.ended_s <= episode.recovered_s + REFUSAL_SLACK_S
        ),
        None,
    )


def _content(call: Call, answer: Answer, verdict: Verdict) -> Iterator[Violation]:
    ids = call.token_ids
    position = first_difference(ids, answer.token_ids)
    is_whole = call.status is not None and call.status.code == "OK"
    if position is not None:
        kind = kind_of_difference(ids, answer.token_ids, position)
        if kind == "CHANGED":
            verdict.departures.append(Departure(call, answer, position))
        else:
            yield Violation(kind, f"{_name(call)}: from token {position} on, {_excerpt(ids, answer, position)}")
    elif is_whole and (len(ids) < len(answer.token_ids) or call.finish_reason != answer.finish_reason):
        yield Violation("LOST", f"{_name(call)} has {len(ids)} of {len(answer.token_ids)} tokens and ended OK")
    elif call.text != answer.text if is_whole else not answer.text.startswith(call.text):
        yield Violation("CHANGED", f"{_name(call)} has the right tokens and another text: {_texts(call, answer)}")
    elif is_whole:
        verdict.num_exact += 1
    elif call.is_refusal:
        verdict.num_refused += 1
    else:
        verdict.num_cut += 1


def first_difference(ids: Sequence[int], expected: Sequence[int]) -> int | None:
    """Where `ids` stops being a beginning of `expected`; None if it is one."""
    for position, token_id in enumerate(ids):
        if position >= len(expected) or token_id != expected[position]:
            return position
    return None


def kind_of_difference(ids: Sequence[int], expected: Sequence[int], position: int) -> str:
    """LOST or REPEATED if what follows is the expected answer from a later or an earlier place; else CHANGED."""
    run = tuple(ids[position : position + RUN_OF_TOKENS])
    if len(run) < RUN_OF_TOKENS or len(set(run)) == 1:
        return "CHANGED"  # too short to tell, or the same token over and over: at a near-tie, all of it may be right
    for place in range(len(expected) - RUN_OF_TOKENS + 1):
        if place != position and tuple(expected[place : place + RUN_OF_TOKENS]) == run:
            # A text that goes round in a circle looks like this after a near-tie, too; then not all of the rest fits.
            rest = ids[position:]
            if tuple(rest[: len(expected) - place]) == tuple(expected[place : place + len(rest)]):
                return "LOST" if place > position else "REPEATED"
    return "CHANGED"


def open_episode_faults(episodes: Sequence[Episode]) -> Iterator[Violation]:
    """Whether each fault had as many deaths as it may have, and the server came back."""
    seen: Counter[str] = Counter(death_id for episode in episodes for death_id in episode.death_ids)
    for death_id, count in seen.items():
        if count > 1:
            yield Violation("RECORD", f"death {death_id} has {count} records")
    for episode in episodes:
        count = len(episode.death_ids)
        if not episode.deaths_min <= count <= episode.deaths_max:
            wanted = f"{episode.deaths_min} to {episode.deaths_max}"
            yield Violation("RECORD", f"{episode.fault}: {count} `fatal error` records, allowed are {wanted}")
        if episode.recovered_s == float("inf"):
            yield Violation("HUNG", f"{episode.fault}: the server did not serve again")
        elif episode.recovered_s - episode.began_s > RECOVERY_LIMIT_S:
            seconds = episode.recovered_s - episode.began_s
            yield Violation("HUNG", f"{episode.fault}: the server served again only after {seconds:.0f} s")


def _name(call: Call) -> str:
    return f"ask {call.ask.number} (sent at {call.sent_s:.3f})"


def _excerpt(ids: Sequence[int], answer: Answer, position: int) -> str:
    got = list(ids[position : position + RUN_OF_TOKENS])
    return f"{got} instead of {list(answer.token_ids[position : position + RUN_OF_TOKENS])}"


def _texts(call: Call, answer: Answer) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(call.text, answer.text, strict=False)) if a != b),
        min(len(call.text), len(answer.text)),
    )
    return f"{call.text[place : place + 20]!r} instead of {answer.text[place : place + 20]!r} at {place}"
