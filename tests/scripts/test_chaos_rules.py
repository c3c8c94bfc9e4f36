"""The judge of the fault suite, with made-up histories: each kind of violation is found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scripts.fault_suite.history import Answer, Ask, Call, Episode, Message, Status
from scripts.fault_suite.rules import Mode, Verdict, judge, kind_of_difference, open_episode_faults

IDS = tuple(range(100, 112))
TEXTS = tuple(f"<{token_id}>" for token_id in IDS)
ANSWER = Answer(IDS, "".join(TEXTS), "MAX_TOKENS")
FIELDS = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": len(IDS)}, "output": {"token_ids": True}}
ASK = Ask(0, FIELDS)
REPLAY, FAIL = Mode(replays=True), Mode(replays=False)
DEATH = "0123456789abcdef"
DEAD = Status("UNAVAILABLE", "ENGINE_DEAD", DEATH, -1)
KILL = Episode("kill", 10.0, 12.0, [DEATH], 1, 1)


def call(ids: tuple[int, ...] = IDS, *, sent_s: float = 9.0, ended_s: float | None = 13.0, ask: Ask = ASK) -> Call:
    """A stream of one token a message that ended OK, or, with fewer tokens, was cut off by `DEAD`."""
    whole = len(ids) >= len(IDS)
    messages = [
        Message(
            at_s=sent_s + 0.1 * place,
            text=f"<{token_id}>",
            token_ids=(token_id,),
            has_prompt=place == 0,
            finish_reason="MAX_TOKENS" if whole and place == len(ids) - 1 else None,
            usage_completion=len(ids) if whole and place == len(ids) - 1 else None,
        )
        for place, token_id in enumerate(ids)
    ]
    status = None if ended_s is None else Status("OK") if whole else DEAD
    return Call(ask, sent_s, messages, ended_s=ended_s, status=status)


def refused(sent_s: float, waited_s: float = 0.1, status: Status | None = None) -> Call:
    status = status or Status("UNAVAILABLE", "ENGINE_STARTING", "", 500)
    return Call(ASK, sent_s, ended_s=sent_s + waited_s, status=status)


def verdict(*calls: Call, mode: Mode = REPLAY, episodes: tuple[Episode, ...] = (KILL,)) -> Verdict:
    return judge(calls, {0: ANSWER}, episodes, mode)


def kinds(*calls: Call, mode: Mode = REPLAY, episodes: tuple[Episode, ...] = (KILL,)) -> list[str]:
    return [violation.kind for violation in verdict(*calls, mode=mode, episodes=episodes).violations]


def test_an_unbroken_answer_is_exact() -> None:
    """Across a death, too; so is one whose tokens come several a message."""
    joined = call()
    joined.messages = [
        replace(joined.messages[0], token_ids=IDS[:11], text="".join(TEXTS[:11])),
        joined.messages[-1],
    ]
    found = verdict(call(), joined)
    assert (found.violations, found.departures, found.num_exact) == ([], [], 2)


def test_a_stream_without_an_end_has_hung() -> None:
    """However many tokens it has."""
    assert kinds(call(IDS[:4], ended_s=None)) == ["HUNG"]
    assert kinds(Call(ASK, 9.0)) == ["HUNG"]


def _without(place: int, *, usage: int | None = None) -> Call:
    """A token is lost in the middle; its usage counts what was sent, or what was made."""
    broken = call()
    del broken.messages[place]
    broken.messages[-1] = replace(broken.messages[-1], usage_completion=usage or len(IDS) - 1)
    return broken


def test_a_lost_token_is_found() -> None:
    """By what follows it, even if all counts agree; and by its usage, even if there is nothing to compare with."""
    assert "LOST" in kinds(_without(5))
    assert "LOST" in kinds(_without(5, usage=len(IDS)))
    unknown = judge([_without(5, usage=len(IDS))], {}, [KILL], REPLAY)
    assert [violation.kind for violation in unknown.violations] == ["LOST"]


def test_a_lost_end_is_found() -> None:
    """OK without a finish, without usage, or before max_tokens."""
    for change in ({"finish_reason": None}, {"usage_completion": None}):
        broken = call()
        broken.messages[-1] = replace(broken.messages[-1], **change)
        assert "LOST" in kinds(broken)
    early = call()
    early.messages = [*early.messages[:5], replace(early.messages[5], finish_reason="MAX_TOKENS", usage_completion=6)]
    assert "LOST" in kinds(early)
    assert "LOST" in kinds(Call(ASK, 9.0, ended_s=13.0, status=Status("OK")))


def test_a_repeated_token_is_found() -> None:
    """One message twice, a stretch twice, or the whole answer anew."""
    twice = call()
    twice.messages.insert(4, twice.messages[3])
    assert "REPEATED" in kinds(twice)
    assert "REPEATED" in kinds(call((*IDS[:6], *IDS[2:8])))
    anew = call()
    anew.messages = [*anew.messages[:3], *anew.messages]
    assert {"REPEATED", "MALFORMED"} <= set(kinds(anew))


def test_a_second_finish_is_found() -> None:
    """The last delta sent again after a replay."""
    twice = call()
    twice.messages.append(twice.messages[-1])
    assert "REPEATED" in kinds(twice)


def test_a_changed_token_is_handed_on_to_be_judged() -> None:
    """It may be a near-tie: only a model can tell."""
    found = verdict(call((*IDS[:6], 999, *IDS[7:])))
    assert [(one.position, one.call.ask) for one in found.departures] == [(6, ASK)]
    assert (found.violations, found.num_exact) == ([], 0)


def test_a_changed_text_is_found() -> None:
    """The tokens are right and the text is not: whole, or cut off in the middle."""
    for broken in (call(), call(IDS[:5])):
        broken.messages[3] = replace(broken.messages[3], text="?")
        mode = REPLAY if len(broken.messages) == len(IDS) else FAIL
        assert kinds(broken, mode=mode) == ["CHANGED"]


def test_text_that_was_lost_at_a_seam_is_found() -> None:
    """A character that was held back at the death and is never sent."""
    broken = call()
    broken.messages[6] = replace(broken.messages[6], text="")
    assert kinds(broken) == ["CHANGED"]


def test_other_sequences_and_second_prompts_are_found() -> None:
    """`index` is 0 and `prompt` comes once."""
    broken = call()
    broken.messages[2] = replace(broken.messages[2], index=1)
    assert kinds(broken) == ["MALFORMED"]
    broken = call()
    broken.messages[2] = replace(broken.messages[2], has_prompt=True)
    assert kinds(broken) == ["MALFORMED"]


def test_with_replay_a_stream_that_was_there_has_no_end_but_ok() -> None:
    """Neither the death's status, nor an internal error, nor a refusal of what was sent before the fault."""
    assert kinds(call(IDS[:5])) == ["BAD END"]
    internal = replace(DEAD, code="INTERNAL", reason="INTERNAL")
    assert kinds(Call(ASK, 9.0, ended_s=11.0, status=internal)) == ["BAD END"]
    assert kinds(refused(5.0)) == ["BAD END"]


def test_a_refusal_in_the_time_of_a_fault_is_no_loss() -> None:
    """It comes soon, says when to come back, and nothing has been sent."""
    assert kinds(refused(11.0)) == []
    assert kinds(refused(11.0, waited_s=30.0)) == ["BAD END"]
    assert kinds(refused(40.0)) == ["BAD END"]
    assert kinds(refused(11.0, status=Status("UNAVAILABLE", "ENGINE_STARTING"))) == ["BAD END"]
    assert kinds(refused(11.0, status=Status("UNAVAILABLE", "SOMETHING", "", 5))) == ["BAD END"]
    assert kinds(refused(11.0, status=Status("RESOURCE_EXHAUSTED", "QUEUE_FULL", "", 5))) == ["BAD END"]


def test_a_death_that_no_record_has_is_found() -> None:
    """A refusal, or with `fail` a stream's end, names a death of the log."""
    unknown = Status("UNAVAILABLE", "ENGINE_DEAD", "feed", 500)
    assert kinds(refused(11.0, status=unknown)) == ["RECORD"]
    stream = call(IDS[:5])
    stream.status = replace(DEAD, death_id="feed")
    assert kinds(stream, mode=FAIL) == ["RECORD"]


def test_with_fail_a_death_ends_its_streams() -> None:
    """ENGINE_DEAD with a pushback: −1 for those of the dying step, the others are told when to come back."""
    assert kinds(call(IDS[:5]), mode=FAIL) == []
    assert verdict(call(IDS[:5]), mode=FAIL).num_cut == 1
    told = call(IDS[:5])
    told.status = replace(DEAD, pushback_ms=500)
    assert kinds(told, mode=FAIL) == []
    told.status = replace(DEAD, pushback_ms=None)
    assert kinds(told, mode=FAIL) == ["BAD END"]
    assert kinds(call(IDS[:5]), mode=FAIL, episodes=()) == ["BAD END"]


def test_what_a_cut_stream_had_is_judged_too() -> None:
    """With `fail`, or where its client left."""
    assert len(verdict(call((*IDS[:4], 999)), mode=FAIL).departures) == 1
    left = call((*IDS[:4], 999))
    left.left_s, left.status = 9.4, Status("CANCELLED")
    assert len(verdict(left).departures) == 1


def test_a_client_that_leaves_ends_its_call() -> None:
    """That is no violation; not to end then is one."""
    left = call(IDS[:4])
    left.left_s, left.status = 9.4, Status("CANCELLED")
    assert kinds(left) == []
    left.ended_s, left.status = None, None
    assert kinds(left) == ["HUNG"]


def test_only_as_many_streams_are_spoiled_as_a_fault_may_spoil() -> None:
    """One INTERNAL for a fault in one stream's own text; a second one is one too many."""
    fault = replace(KILL, fault="raise in detokenizing", death_ids=[], deaths_min=0, num_spoiled_max=1)
    spoiled = call(IDS[:5], ended_s=11.0)
    spoiled.status = Status("INTERNAL", "INTERNAL", "", -1)
    assert kinds(spoiled, episodes=(fault,)) == []
    assert kinds(spoiled, spoiled, episodes=(fault,)) == ["BAD END"]
    assert kinds(spoiled) == ["BAD END"]


def test_a_second_death_may_convict_one_innocent() -> None:
    """One for each death after the first, and from then on its like; a single death convicts nobody."""

    def convicted(number: int, ended_s: float) -> Call:
        ask = Ask(number, FIELDS)
        return Call(ask, 9.0, ended_s=ended_s, status=Status("INTERNAL", "POISON_REQUEST", "", -1))

    twice = replace(KILL, fault="kill twice", death_ids=[DEATH, "second"], deaths_max=2)
    found = verdict(convicted(3, 11.0), convicted(3, 30.0), episodes=(twice,))
    assert (found.violations, found.num_convicted) == ([], 1)
    assert kinds(convicted(3, 11.0), convicted(4, 11.5), episodes=(twice,)) == ["BAD END"]
    assert kinds(convicted(3, 11.0)) == ["BAD END"]

    suspected = Call(Ask(3, FIELDS), 9.0, ended_s=10.1, status=DEAD)
    assert kinds(suspected, convicted(3, 11.0), mode=FAIL) == []
    assert kinds(suspected, convicted(4, 11.0), mode=FAIL) == ["BAD END"]


def test_a_poison_is_told_never_to_come_back() -> None:
    """INTERNAL with pushback −1; to be told to come back would kill the next replica."""
    poison = Ask(7, FIELDS, is_poison=True)
    culprit = Call(poison, 9.0, ended_s=11.0, status=Status("INTERNAL", "POISON_REQUEST", "", -1))
    assert kinds(culprit) == []
    culprit.status = Status("INTERNAL", "POISON_REQUEST", "", 500)
    assert kinds(culprit) == ["BAD END"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda episode: episode.death_ids.append("second"), "RECORD"),
        (lambda episode: episode.death_ids.clear(), "RECORD"),
        (lambda episode: episode.death_ids.append(DEATH), "RECORD"),
        (lambda episode: setattr(episode, "recovered_s", float("inf")), "HUNG"),
    ],
    ids=["two records", "no record", "the same record twice", "never recovered"],
)
def test_records_and_recovery_are_counted(change: Callable[[Episode], None], kind: str) -> None:
    """One record per death, and the server comes back."""
    episode = replace(KILL, death_ids=[DEATH])
    assert list(open_episode_faults([episode])) == []
    change(episode)
    assert kind in [violation.kind for violation in open_episode_faults([episode])]


def test_a_text_that_goes_in_circles_is_not_called_lost_or_repeated() -> None:
    """After a near-tie it may look as if it had jumped; unless all that follows fits, a model must judge."""
    circle = (1, 2, 3, 4, 5, 6) * 3
    departed = (*circle[:8], 3, 4, 5, 6, 99, 98, 97, 96, 95, 94)
    position = next(i for i, (a, b) in enumerate(zip(departed, circle, strict=True)) if a != b)
    assert kind_of_difference(departed, circle, position) == "CHANGED"
    assert kind_of_difference((*IDS[:3], *IDS[4:]), IDS, 3) == "LOST"
    assert kind_of_difference((*IDS[:5], *IDS[3:]), IDS, 5) == "REPEATED"
