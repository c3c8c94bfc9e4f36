"""What the front end and the guide compiler's process say to each other, in the frames of `codec.py`.

What lives here: frozen, slotted dataclasses of plain values. What must not: behaviour, imports beyond the standard
library. The texts in here are users': they go over an inherited socket, never to a log or a command line.

The front end sends `GuideCompilerConfig` first and then `CompileGuide`s, and hears `GuideCompilerReady` and one
`GuideCompiled` for each, in whatever order they are done; or `GuideCompilerFailed`, and then nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class GuideKind(IntEnum):
    """What a guide is written in."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    GRAMMAR = 4
    CHOICE = 5


@dataclass(frozen=True, slots=True)
class GuideSource:
    """A guide as its caller wrote it."""

    kind: GuideKind
    text: str = ""
    """The schema, the expression or the grammar; empty for the other kinds."""
    options: tuple[str, ...] = ()
    """Of a choice."""


class GuideOutcome(IntEnum):
    """What became of a compilation."""

    COMPILED = 1
    MALFORMED = 2
    """It is not what it says it is, or nothing matches it."""
    UNSUPPORTED = 3
    """It asks for what could not be held to exactly."""
    TIME = 4
    """It took, or following it would take, more time than it may."""
    MEMORY = 5
    """It took more memory than it may, the stack's included."""
    SIZE = 6
    """What it compiles to is larger than it may be."""


@dataclass(frozen=True, slots=True)
class GuideCompilerConfig:
    """The first message of all."""

    model: str
    """As in `EngineConfig`."""
    revision: str | None
    vocab_size: int
    """Rows of the vocabulary projection."""
    eos_token_ids: tuple[int, ...]
    """At least one; what a guided output ends with."""
    timeout_s: float
    """CPU time of one compilation."""
    elapsed_timeout_s: float
    """What one may take in all: it is niced, and may wait for its CPU time on a busy machine."""


@dataclass(frozen=True, slots=True)
class CompileGuide:
    """Compile this."""

    job_id: int
    source: GuideSource


@dataclass(frozen=True, slots=True)
class GuideCompilerReady:
    """Imports and vocabulary are there."""

    pid: int
    startup_s: float


@dataclass(frozen=True, slots=True)
class GuideCompiled:
    """The end of one compilation."""

    job_id: int
    outcome: GuideOutcome
    guide: bytes = b""
    """With COMPILED: `Submit.guide`."""
    what: str = ""
    """With UNSUPPORTED: the names of what is, from a list of ours, never a caller's words."""


@dataclass(frozen=True, slots=True)
class GuideCompilerFailed:
    """It cannot work at all; the process ends."""

    exception_type: str
    message: str
    """Of an exception that was raised before any guide came."""
    is_unsupported: bool = False
    """It never will: the model's tokenizer is of a kind that guides cannot follow."""


GuideMessage = GuideCompilerConfig | CompileGuide | GuideCompilerReady | GuideCompiled | GuideCompilerFailed
