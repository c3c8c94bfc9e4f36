"""The engine's side of guides: from `Submit.guide` to which tokens may come next, one matcher per sequence.

What must live here: reading compiled guides, the state of a matcher as a function of its sequence's output, and what
becomes of a request whose guide cannot be followed. What must not: the batch (`input_batch.py`), logits (`sampler.py`),
compilation (`compiler.py`, in another process).

A matcher is brought up to its sequence's output each time it is asked, so it does not matter whether those tokens were
sampled here, resumed by the caller, or replayed after an engine's death.

The library, the vocabulary and each compiled guide are read in a thread beside the engine's loop, at the first request
that needs them; that one is not let in before (`is_ready`), and no step waits. The library lets go of the interpreter
meanwhile.

Whatever goes wrong in one matcher is that request's failure and never an exception of the step.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scheduler import logs
from scheduler.core.output import SequenceFailure
from scheduler.messages import FailureKind

Int32Array = npt.NDArray[np.int32]

GUIDE_BYTES_MAX = 16 * 1024 * 1024
"""Of a compiled guide once it is unpacked; the compiler's own limit is lower."""
CACHE_BYTES_MAX = 32 * 1024 * 1024
"""Of compiled guides kept for the next request that brings the same one."""
ERRORS_MAX = 64
"""Guides whose reading failed, and that nobody has opened yet."""
MASK_S_MAX = 1.0
"""CPU time that one token of one sequence may take; all others wait meanwhile."""


class GuideMismatchError(Exception):
    """The output does not follow the guide."""


class Guide(Protocol):
    """Follows one output."""

    def follow(self, output_ids: Int32Array) -> None:
        """Take in all output tokens there are; those of the last call come first. Raises GuideMismatchError."""
        ...

    def fill(self, bitmask: Int32Array, row: int) -> None:
        """Set row `row` of `bitmask` [rows, V / 32]: bit i of word w is 1 where token 32 w + i may come next."""
        ...


class Guides(Protocol):
    """Opens the guides of one batch."""

    def is_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        """False while `open` would have to read first; the reading has then begun."""
        ...

    def open(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Guide:
        """A new matcher at the beginning of the guide. Raises whatever is wrong with it."""
        ...


class CompiledGuides:
    """`Guides` for one model: a cache that a thread fills. Who asked for a guide may be gone when it has been read."""

    def __init__(self, model: str, revision: str | None, vocab_size: int) -> None:
        self._reader = GuideReader(model, revision, vocab_size)
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        """Of what follows."""
        self._being_read: dict[_Key, Future[Any]] = {}
        self._compiled: OrderedDict[_Key, Any] = OrderedDict()
        self._cached_bytes = 0
        self._errors: OrderedDict[_Key, Exception] = OrderedDict()

    def is_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:
        """See `Guides`."""
        key = (guide, eos_token_ids)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return True
            if key in self._errors:
                return True
            self._begin(key)
            return False

    def open(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Guide:
        """See `Guides`. Waits where `is_ready` would be false."""
        import xgrammar  # noqa: PLC0415 - half a second that only those pay who use a guide

        key = (guide, eos_token_ids)
        with self._lock:
            compiled: Any = self._compiled.get(key)
            error = self._errors.pop(key, None)
            reading = self._begin(key) if compiled is None and error is None else None
        if error is not None:
            raise error
        if reading is not None:
            compiled = reading.result()
        return _XGrammarGuide(xgrammar.GrammarMatcher(compiled))

    def _begin(self, key: _Key) -> Future[Any]:
        """Under the lock."""
        if key not in self._being_read:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="guides")
            self._being_read[key] = self._executor.submit(self._read, key)
        return self._being_read[key]

    def _read(self, key: _Key) -> Any:
        """In the thread."""
        try:
            compiled = self._reader.read(*key)
        except Exception as error:
            with self._lock:
                del self._being_read[key]
                self._errors[key] = error
                if len(self._errors) > ERRORS_MAX:
                    self._errors.popitem(last=False)
            raise
        with self._lock:
            del self._being_read[key]
            self._compiled[key] = compiled
            self._cached_bytes += compiled.memory_size_bytes
            while self._cached_bytes > CACHE_BYTES_MAX and len(self._compiled) > 1:
                _, oldest = self._compiled.popitem(last=False)
                self._cached_bytes -= oldest.memory_size_bytes
        return compiled


_Key = tuple[bytes, tuple[int, ...]]
"""A compiled guide and the end-of-sequence ids. Bytes remember their hash, and many hold the very same object."""


class GuideReader:
    """Turns bytes back into a compiled grammar; what that takes is imported and read at the first one."""

    def __init__(self, model: str, revision: str | None, vocab_size: int) -> None:
        self._model = model
        self._revision = revision
        self._vocab_size = vocab_size
        self._vocabulary: list[bytes] | None = None
        self._vocabularies: tuple[tuple[int, ...], Any] | None = None

    def read(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Any:
        """The compiled grammar. Raises whatever is wrong with the bytes, or with the model's files."""
        import xgrammar  # noqa: PLC0415 - see above

        unpacker = zlib.decompressobj()
        serialised = unpacker.decompress(guide[1:], GUIDE_BYTES_MAX)
        if not unpacker.eof:
            raise ValueError("a compiled guide is cut short, or too long")
        return xgrammar.CompiledGrammar.deserialize_json(serialised.decode(), self._info(guide[:1], eos_token_ids))

    def _info(self, form: bytes, eos_token_ids: tuple[int, ...]) -> Any:
        from scheduler.model.guided.vocabulary import Vocabularies, read_vocabulary  # noqa: PLC0415 - see above

        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._model, self._revision, self._vocab_size)
        if self._vocabularies is None or self._vocabularies[0] != eos_token_ids:  # a server has one set of them
            self._vocabularies = eos_token_ids, Vocabularies(self._vocabulary, eos_token_ids)
        return self._vocabularies[1].info(form)


class _XGrammarGuide:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_followed = 0

    def follow(self, output_ids: Int32Array) -> None:
        for token_id in output_ids[self._num_followed :].tolist():
            if not self._matcher.accept_token(token_id):
                raise GuideMismatchError
            self._num_followed += 1

    def fill(self, bitmask: Int32Array, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask, row)


class EveryToken:
    """A guide that allows every token, and `Guides` that open no other: what masks cost can be measured with it."""

    def is_ready(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> bool:  # noqa: ARG002 - of a protocol
        return True

    def open(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Guide:  # noqa: ARG002 - of a protocol
        return self

    def follow(self, output_ids: Int32Array) -> None:
        pass

    def fill(self, bitmask: Int32Array, row: int) -> None:
        bitmask[row] = -1


class GuidedSequence:
    """The guide of one sequence, opened at its first use."""

    def __init__(self, guides: Guides, guide: bytes, eos_token_ids: tuple[int, ...], num_given: int) -> None:
        """`num_given`: output tokens that it came with; that they follow the guide is only the caller's word."""
        self._guides = guides
        self._guide = guide
        self._eos_token_ids = eos_token_ids
        self._num_given = num_given
        self._matcher: Guide | None = None

    def fill(self, output_ids: Int32Array, bitmask: Int32Array, row: int) -> SequenceFailure | None:
        """What may come after `output_ids`, into row `row` of the mask; or why there is no telling."""
        try:
            if self._matcher is None:
                self._matcher = self._guides.open(self._guide, self._eos_token_ids)
                self._matcher.follow(output_ids[: self._num_given])
        except GuideMismatchError:
            return SequenceFailure(FailureKind.BAD_GUIDE)
        except Exception as error:  # noqa: BLE001 - one request's failure, whatever the library raises
            return _internal(error)
        begun_s = time.thread_time()
        try:
            self._matcher.follow(output_ids)
            self._matcher.fill(bitmask, row)
        except Exception as error:  # noqa: BLE001 - as above; a token that the mask had allowed is refused: our bug
            return _internal(error)
        if time.thread_time() - begun_s > MASK_S_MAX:
            return SequenceFailure(FailureKind.GUIDE_TOO_SLOW)
        return None


def _internal(error: Exception) -> SequenceFailure:
    """Logged here, where it is known; without its text, which may quote the guide."""
    incident_id = secrets.token_hex(8)
    logs.get_logger().error("guide failed", incident_id=incident_id, error=type(error).__name__)
    return SequenceFailure(FailureKind.INTERNAL, incident_id)
