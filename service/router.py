"""Which replica a request goes to: the one with least to do, unless another has its prefix.

What lives here: what each replica still has to compute, what prefixes it was given, and the choice. What must not: I/O,
the replicas themselves (who may be chosen is handed in), what kills them.

The rule: the lowest score wins, where

    score = outstanding tokens − AFFINITY_WEIGHT · matched prefix tokens

Outstanding are the prompt until the first output, and of each sequence what `max_tokens` leaves it to produce. A prefix
matches as far as the replica was given the same runs of `RUN_TOKENS` prompt ids under the same cache salt; it is not
known whether the engine still has them, so the memory is as long as a KV pool, not longer. The weight says how many
tokens of imbalance a token saved is worth: more than one, since `max_tokens` is a bound that most answers stay below,
and a sequence more in a batch costs less than a prompt computed twice. Replicas that the hang watch suspects are chosen
only where there is no other. Equal scores: the one with less to do, then the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import Submit

RUN_TOKENS = 64
AFFINITY_WEIGHT = 2.0
NUM_RUNS_MAX = 16 * 1024
"""Per replica; a million tokens."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request now."""

    index: int
    is_suspect: bool = False
    """It has been still for half of its deadline."""


@dataclass(slots=True)
class _Outstanding:
    """What one request still costs its replica."""

    index: int
    num_tokens: int
    num_input_tokens: int
    """Of these, what the first output shows to be done."""


class _Replica:
    """What the router knows of one engine."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.runs: OrderedDict[int, None] = OrderedDict()
        """Hashes of the runs it was given, the one to be forgotten first in front."""


class Router:
    """One per server. Told of everything that is sent, put out and ended."""

    def __init__(
        self, num_replicas: int, *, affinity_weight: float = AFFINITY_WEIGHT, num_runs_max: int = NUM_RUNS_MAX
    ) -> None:
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._affinity_weight = affinity_weight
        self._num_runs_max = num_runs_max
        self._requests: dict[int, _Outstanding] = {}

    def num_outstanding_tokens(self, index: int) -> int:
        """What this replica was given and has not done yet."""
        return self._replicas[index].num_tokens

    def choose(self, candidates: Sequence[Candidate], submit: Submit) -> int | None:
        """The index of the replica that should have it; None if there is no candidate. Costs one look per replica and
        run of the prompt, and nothing where there is no choice.
        """
        allowed = [candidate.index for candidate in candidates if not candidate.is_suspect]
        allowed = allowed or [candidate.index for candidate in candidates]
        if len(allowed) <= 1:
            return allowed[0] if allowed else None
        runs = self._runs_of(submit)

        def rank(index: int) -> tuple[float, int, int]:
            replica = self._replicas[index]
            matched = 0
            for run in runs:
                if run not in replica.runs:
                    break
                matched += RUN_TOKENS
            return replica.num_tokens - self._affinity_weight * matched, replica.num_tokens, index

        return min(allowed, key=rank)

    def on_sent(self, index: int, submit: Submit) -> None:
        """It goes to this replica."""
        assert submit.request_id not in self._requests
        nums_resumed = [len(start.resume_token_ids) for start in submit.sequences]
        num_input = len(submit.prompt_token_ids) + sum(nums_resumed)
        num_output = sum(max(submit.stopping.max_tokens - num_resumed, 0) for num_resumed in nums_resumed)
        self._requests[submit.request_id] = _Outstanding(index, num_input + num_output, num_input)
        replica = self._replicas[index]
        replica.num_tokens += num_input + num_output
        # The first run is used last: a run is found only by way of those before it, so the tail has to go first.
        for run in reversed(self._runs_of(submit)):
            replica.runs[run] = None
            replica.runs.move_to_end(run)
        while len(replica.runs) > self._num_runs_max:
            replica.runs.popitem(last=False)

    def on_output(self, request_id: int, num_tokens: int) -> None:
        """The replica has put out so many tokens of it. Unknown requests are ignored, as by `on_end`."""
        request = self._requests.get(request_id)
        if request is not None:
            self._reduce(request, request.num_input_tokens + num_tokens)
            request.num_input_tokens = 0

    def on_end(self, request_id: int) -> None:
        """Nothing more is computed for it, whatever the reason. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._reduce(request, request.num_tokens)

    def on_death(self, index: int) -> None:
        """What this replica had, and its memory of prefixes, is gone."""
        self._requests = {key: request for key, request in self._requests.items() if request.index != index}
        self._replicas[index] = _Replica()

    def _reduce(self, request: _Outstanding, num_tokens: int) -> None:
        done = min(num_tokens, request.num_tokens)
        request.num_tokens -= done
        self._replicas[request.index].num_tokens -= done

    def _runs_of(self, submit: Submit) -> list[int]:
        """A hash of each whole run of the prompt together with all before it: equal ones mean equal prefixes. A chance
        collision sends a request to another replica than the best, no more.
        """
        if len(self._replicas) == 1 or submit.cache_bypass:
            return []
        prompt = submit.prompt_token_ids
        num_runs = min(len(prompt) // RUN_TOKENS, self._num_runs_max)
        value, runs = hash(submit.cache_salt), []
        for start in range(0, num_runs * RUN_TOKENS, RUN_TOKENS):
            value = hash((value, prompt[start : start + RUN_TOKENS]))
            runs.append(value)
        return runs
