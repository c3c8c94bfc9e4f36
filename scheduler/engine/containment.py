"""What a failed step costs: the request that made it fail, if there is one, and of the others only time.

What lives here: what kind of failure an exception is, and who is retried with whom. What must not: I/O, a clock,
logging, tensors, the runner. `EngineCore` asks whether the process is healthy, resets the runner and writes the log;
`Containment` moves the scheduler alone, and only between steps.

**Isolation.** The requests of a failed step are suspects. They are retried in halves: while the scheduler is confined
to one group, the rest of the world waits, until each of the group has got past the place where it was (by one output
token of each of its sequences, at first) or has ended; then comes the next group. If a step of a group fails, the
suspects are those of that step, and they are split again; the rest of the group becomes a group of its own. A request
whose steps failed twice in one place, the second time with nothing else in it, is the culprit and fails (STEP_FAILED).
Once is not enough, not even for one that was alone: a fault that passes is nobody's. What fails in company alone, again
and again, has no culprit either: each isolation that found none and is soon followed by another makes that one's groups
stay apart for twice as many tokens, so that the failures stay few beside the tokens.

**Out of memory** is nobody's fault until there is nothing left to save: steps get smaller (half the tokens of the one
that failed), then fewer sequences share them (half as many), then the one sequence that does not fit in its smallest
chunk fails (OUT_OF_MEMORY). `NUM_GOOD_STEPS_TO_DOUBLE` good steps later the bounds are doubled, and so on up to the
configured ones. It goes on within an isolation too, and leaves its groups as they are.

**Why it ends.** Each failure either removes a request, or lowers a bound that only good steps raise, or splits a group
into smaller ones; a group of one that fails removes its request, or has got a token since. Each group that succeeds
leaves each of its requests a token longer, and requests are finite. So between two failures that split nothing, lower
nothing and remove nothing somebody got a token.
"""

from __future__ import annotations

import errno
from collections import deque
from enum import Enum, auto

from scheduler.core.scheduler import Scheduler
from scheduler.flight_record import StepShape
from scheduler.messages import FailureKind, RequestFailure

NUM_GOOD_STEPS_TO_DOUBLE = 64
SMALLEST_CHUNK_TOKENS = 16
"""A step of one sequence is not cut any smaller; what it saves would no longer be worth the steps."""

NUM_STEPS_TO_FORGET = 64
"""A step that fails later than this after an isolation has nothing to do with it."""
DISTANCE_TOKENS_MAX = 32
"""Tokens that a group gets by itself, at most: all others wait meanwhile."""

_OUT_OF_MEMORY_CLASSES = frozenset({"OutOfMemoryError"})
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory")
"""What torch's CPU allocator says in a plain RuntimeError."""
_UNHEALTHY_CLASSES = frozenset({"AcceleratorError"})
_UNHEALTHY_PREFIX = "CUDA error"

Group = tuple[int, ...]
"""Requests that are retried together."""


class Cause(Enum):
    """What kind of failure an exception of the runner is."""

    STEP = auto()
    """Something in this step; the process is as it was."""
    OUT_OF_MEMORY = auto()
    """The step was too large for what memory there is."""
    DEVICE = auto()
    """The process can compute no more: a CUDA context does not survive its errors."""


def cause_of(error: Exception) -> Cause:
    """Judged by type and text, without importing what raised it."""
    class_names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, MemoryError) or class_names & _OUT_OF_MEMORY_CLASSES:
        return Cause.OUT_OF_MEMORY
    if class_names & _UNHEALTHY_CLASSES or str(error).startswith(_UNHEALTHY_PREFIX):
        return Cause.DEVICE
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Cause.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
        return Cause.OUT_OF_MEMORY
    return Cause.STEP


class Containment:
    """Call `settle` before each schedule(), `step_failed` or `step_succeeded` after each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: deque[Group] = deque()
        """Still to get past their places; the scheduler is confined to the first. Empty: no isolation."""
        self._places: dict[int, dict[int, int]] = {}
        """Suspect → output tokens of each of its sequences when its step failed."""
        self._distance = 1
        """Tokens beyond their places that get a suspect's sequences past them."""
        self._is_fruitless = False
        """Whether the last isolation found no culprit; so far, while there is one."""
        self._num_steps_together = 0
        """Good steps since the last isolation."""
        self._is_limited = False
        self._num_good_steps = 0
        """Since the bounds were last changed; counted while they are below the configured ones."""

    @property
    def is_isolating(self) -> bool:
        """Whether requests are held back, so that the scheduler's own word that it has no work does not count."""
        return bool(self._groups)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going on here: a failure now would be news."""
        return not self._groups and not self._is_limited

    def settle(self) -> bool:
        """Let the next group have its turn where the present one is done. True if the runner must be reset."""
        if not self._groups or not self._is_done(self._groups[0]):
            return False
        remaining = (self._suspects_of(group) for group in self._groups)
        self._groups = deque(group for group in remaining if group)
        if not self._groups:
            self._end_isolation()
            return False
        self._scheduler.vacate()
        self._scheduler.confine(self._groups[0])
        return True

    def step_succeeded(self) -> None:
        """Count it; bounds are raised again after enough of them."""
        self._num_steps_together += 1
        if not self._is_limited:
            return
        self._num_good_steps += 1
        if self._num_good_steps == NUM_GOOD_STEPS_TO_DOUBLE:
            self._limit(2 * self._scheduler.max_num_seqs, 2 * self._scheduler.max_num_batched_tokens)

    def step_failed(self, cause: Cause, shape: StepShape) -> tuple[RequestFailure, ...]:
        """Drop the step in flight and arrange for what comes next. The runner must be reset. Returns who failed."""
        assert cause is not Cause.DEVICE, "that is not to be contained"
        in_step = self._scheduler.drop_step()
        if cause is Cause.OUT_OF_MEMORY:
            return self._make_steps_smaller(in_step, shape)
        return self._split(in_step)

    # ---------------------------------------------------------------------------------------------------- isolation

    def _split(self, in_step: Group) -> tuple[RequestFailure, ...]:
        """The requests of this step are suspects, in two groups; one that was isolated already is the culprit."""
        failures: tuple[RequestFailure, ...] = ()
        suspects = tuple(dict.fromkeys(request_id for request_id in in_step if self._is_here(request_id)))
        bystanders: Group = ()
        if self._groups:
            group = self._groups.popleft()
            bystanders = tuple(request_id for request_id in self._suspects_of(group) if request_id not in suspects)
            if len(suspects) == 1 and self._is_at_its_place(suspects[0]):
                failures = self._fail(suspects[0], FailureKind.STEP_FAILED)
                suspects = ()
                self._is_fruitless = False
        else:
            is_again = self._is_fruitless and self._num_steps_together <= NUM_STEPS_TO_FORGET
            self._distance = min(2 * self._distance, DISTANCE_TOKENS_MAX) if is_again else 1
            self._is_fruitless = True
        middle = (len(suspects) + 1) // 2
        new_groups = (suspects[:middle], suspects[middle:], bystanders)
        self._groups.extendleft(group for group in reversed(new_groups) if group)
        for request_id in suspects:
            self._places[request_id] = self._scheduler.num_output_tokens(request_id) or {}
        if self._groups:
            self._scheduler.confine(self._groups[0])
        else:
            self._end_isolation()
        return failures

    def _end_isolation(self) -> None:
        self._places.clear()
        self._num_steps_together = 0
        self._scheduler.unconfine()

    def _is_done(self, group: Group) -> bool:
        """Whether the scheduler need not be confined to this group any longer: all of it is past, or what is not waits
        for what is.
        """
        suspects = self._suspects_of(group)
        return suspects != group and set(suspects).isdisjoint(self._scheduler.step_request_ids)

    def _suspects_of(self, group: Group) -> Group:
        """Those that have neither ended nor got past their place."""
        return tuple(request_id for request_id in group if self._is_suspect(request_id))

    def _is_suspect(self, request_id: int) -> bool:
        num_output_tokens = self._scheduler.num_output_tokens(request_id)
        if num_output_tokens is None:
            return False
        place = self._places[request_id]
        return any(num_tokens < place[index] + self._distance for index, num_tokens in num_output_tokens.items())

    def _is_at_its_place(self, request_id: int) -> bool:
        """Whether no sequence of it has got a token since its step failed before."""
        return self._scheduler.num_output_tokens(request_id) == self._places.get(request_id)

    def _is_here(self, request_id: int) -> bool:
        return self._scheduler.num_output_tokens(request_id) is not None

    # ------------------------------------------------------------------------------------------------ out of memory

    def _make_steps_smaller(self, in_step: Group, shape: StepShape) -> tuple[RequestFailure, ...]:
        smallest = max(shape.num_seqs, SMALLEST_CHUNK_TOKENS)
        if shape.num_batched_tokens > smallest:
            max_num_batched_tokens = max(shape.num_batched_tokens // 2, smallest)
            self._limit(min(self._scheduler.max_num_seqs, max_num_batched_tokens), max_num_batched_tokens)
        elif shape.num_seqs > 1:
            self._limit(shape.num_seqs // 2, max(shape.num_seqs // 2, SMALLEST_CHUNK_TOKENS))
        else:
            return self._fail(in_step[0], FailureKind.OUT_OF_MEMORY)
        return ()

    def _limit(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._scheduler.limit(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._is_limited = self._scheduler.is_limited
        self._num_good_steps = 0

    def _fail(self, request_id: int, kind: FailureKind) -> tuple[RequestFailure, ...]:
        self._scheduler.abort((request_id,))
        return (RequestFailure(request_id, kind),)
