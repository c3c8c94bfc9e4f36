"""Near-ties and changes told apart: by the teacher for plain greedy streams, by a nudge for all others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from scripts.fault_suite import exactness, teacher
from scripts.fault_suite.history import Answer, Ask, Call, Message, Status
from scripts.fault_suite.rules import Departure

WANTED = (10, 11, 12, 13, 14, 15)
SAMPLED = {"sampling": {"temperature": 1.0, "seed": "1"}, "stopping": {"max_tokens": 6}, "output": {"token_ids": True}}


class Server:
    """Says WANTED; at `position` a second token is `margin` logits behind, and after it come 900, 901, …"""

    def __init__(self, position: int, second: int, margin: float) -> None:
        self._position, self._second, self._margin = position, second, margin

    async def attempt(self, call: Call) -> Call:
        fields = call.ask.fields
        ids = list(fields["resume_token_ids"])
        num_resumed = len(ids)
        bias = {int(token_id): value for token_id, value in fields["sampling"].get("logit_bias", {}).items()}
        while len(ids) < fields["stopping"]["max_tokens"]:
            place = len(ids)
            if place == self._position:
                lead = self._margin + bias.get(WANTED[place], 0.0) - bias.get(self._second, 0.0)
                ids.append(WANTED[place] if lead > 0 else self._second)
            elif place > self._position and ids[self._position] == self._second:
                ids.append(900 + place)
            else:
                ids.append(WANTED[place])
        call.messages = [Message(0.0, "", tuple(ids[num_resumed:]))]
        call.status = Status("OK")
        return call


def departure(ids: tuple[int, ...], position: int) -> Departure:
    call = Call(Ask(0, SAMPLED), 0.0, [Message(0.0, "", ids)], ended_s=1.0, status=Status("OK"))
    return Departure(call, Answer(WANTED, "", "MAX_TOKENS"), position)


async def judged(server: Server, one: Departure) -> exactness.Judged:
    client: Any = server
    return await exactness.judge(client, [one])


async def test_a_departure_at_a_near_tie_is_exact() -> None:
    """Either token may come; what follows must be what the server says after it."""
    found = await judged(Server(2, 77, 2e-4), departure((10, 11, 77, 903, 904, 905), 2))
    assert (found.num_near_ties, found.violations) == (1, [])


async def test_a_departure_elsewhere_is_a_change() -> None:
    """Two hundredths of a logit apart: no float rounding swaps these."""
    found = await judged(Server(2, 77, 2e-2), departure((10, 11, 77, 903, 904, 905), 2))
    assert [one.kind for one in found.violations] == ["CHANGED"]


async def test_a_token_that_nobody_would_say_is_a_change() -> None:
    """Not even the second best."""
    found = await judged(Server(2, 77, 2e-4), departure((10, 11, 55, 903, 904, 905), 2))
    assert [one.kind for one in found.violations] == ["CHANGED"]


async def test_what_follows_a_near_tie_is_judged_too() -> None:
    """A stream that departs once more, at no near-tie, was changed."""
    found = await judged(Server(2, 77, 2e-4), departure((10, 11, 77, 903, 55, 905), 2))
    assert [one.kind for one in found.violations] == ["CHANGED"]


class Model:
    """Logits that do not depend on the tokens."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._logits = torch.tensor([rows])

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        assert input_ids.shape[1] >= logits_to_keep
        return SimpleNamespace(logits=self._logits[:, -logits_to_keep:])


def test_the_teacher_takes_the_best_token_or_its_like() -> None:
    """Within the tie where the two best are that close; the best one alone where they are not."""
    model = Model([[0.0, 5.0, 4.9995], [0.0, 5.0, 4.9]])
    assert teacher.judge(model, [1, 2], [1, 1], 1e-3) == ""
    assert teacher.judge(model, [1, 2], [2, 1], 1e-3) == ""
    assert "token 1 is 2" in teacher.judge(model, [1, 2], [2, 2], 1e-3)
    assert "token 0 is 0" in teacher.judge(model, [1, 2], [0, 1], 1e-3)
    assert teacher.judge(model, [1, 2], [], 1e-3) == ""
