"""The engine's side of guides: from `Submit.guide` to which tokens may come next, one matcher per sequence.

What must live here: reading compiled guides, the state of a matcher as a function of its sequence's output, and what
becomes of a request whose guide cannot be followed. What must not: the batch (`input_batch.py`), logits (`sampler.py`),
compilation (`compiler.py`, in another process).

A matcher is brought up to its sequence's output each time it is asked, so it does not matter whether those tokens were
sampled here, resumed by the caller, or replayed after an engine's death. Nothing is read or imported before the first
guided sequence is sampled; that one waits for it, and so does the step it is in.

Whatever goes wrong in one matcher is that request's failure and never an exception of the step.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
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


OpenGuide = Callable[[bytes, tuple[int, ...]], Guide]
"""A new matcher for a compiled guide and the end-of-sequence ids. Raises whatever is wrong with them."""


class Guides:
    """Opens guides for one model. Its vocabulary is read at the first one."""

    def __init__(self, model: str, revision: str | None, vocab_size: int) -> None:
        self._model = model
        self._revision = revision
        self._vocab_size = vocab_size
        self._vocabulary: list[bytes] | None = None
        self._info_of: dict[tuple[int, ...], Any] = {}
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()
        self._cached_bytes = 0

    def __call__(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Guide:
        """An `OpenGuide`."""
        import xgrammar  # noqa: PLC0415 - half a second that only those pay who use a guide

        return _XGrammarGuide(xgrammar.GrammarMatcher(self._read(guide, eos_token_ids)))

    def _read(self, guide: bytes, eos_token_ids: tuple[int, ...]) -> Any:
        import xgrammar  # noqa: PLC0415 - see above

        key = hashlib.blake2b(repr(eos_token_ids).encode() + guide, digest_size=16).digest()
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        unpacker = zlib.decompressobj()
        serialised = unpacker.decompress(guide, GUIDE_BYTES_MAX)
        if not unpacker.eof:
            raise ValueError("a compiled guide is cut short, or too long")
        compiled = xgrammar.CompiledGrammar.deserialize_json(serialised.decode(), self._info(eos_token_ids))
        self._compiled[key] = compiled
        self._cached_bytes += compiled.memory_size_bytes
        while self._cached_bytes > CACHE_BYTES_MAX and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._cached_bytes -= oldest.memory_size_bytes
        return compiled

    def _info(self, eos_token_ids: tuple[int, ...]) -> Any:
        from scheduler.model.guided.vocabulary import read_vocabulary, tokenizer_info  # noqa: PLC0415 - see above

        if eos_token_ids not in self._info_of:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self._model, self._revision, self._vocab_size)
            self._info_of.clear()  # a server has one set of them
            self._info_of[eos_token_ids] = tokenizer_info(self._vocabulary, eos_token_ids)
        return self._info_of[eos_token_ids]


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
    """A guide that allows every token: what a mask costs can be measured with it."""

    def __init__(self, _guide: bytes, _eos_token_ids: tuple[int, ...]) -> None:
        pass

    def follow(self, output_ids: Int32Array) -> None:
        pass

    def fill(self, bitmask: Int32Array, row: int) -> None:
        bitmask[row] = -1


def no_guides(_guide: bytes, _eos_token_ids: tuple[int, ...]) -> Guide:
    """For a batch that is given none."""
    raise NotImplementedError("this batch opens no guides")


class GuidedSequence:
    """The guide of one sequence, opened at its first use."""

    def __init__(self, open_guide: OpenGuide, guide: bytes, eos_token_ids: tuple[int, ...], num_given: int) -> None:
        """`num_given`: output tokens that it came with; that they follow the guide is only the caller's word."""
        self._open_guide = open_guide
        self._guide = guide
        self._eos_token_ids = eos_token_ids
        self._num_given = num_given
        self._matcher: Guide | None = None

    def fill(self, output_ids: Int32Array, bitmask: Int32Array, row: int) -> SequenceFailure | None:
        """What may come after `output_ids`, into row `row` of the mask; or why there is no telling."""
        try:
            if self._matcher is None:
                self._matcher = self._open_guide(self._guide, self._eos_token_ids)
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
