"""`emberline generate`: an answer in the terminal, as it is made; or a conversation.

What lives here: the command line and what is printed. What must not: gRPC; the client does the calls, and carries a
broken stream on unless told otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from emberline.client import Client, Delta, EmberlineError, Resume, errors
from emberline.commands import connect
from emberline.commands import exit as status

SAMPLING = {
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "presence-penalty": float,
    "frequency-penalty": float,
    "repetition-penalty": float,
    "seed": int,
    "n": int,
    "max-tokens": int,
    "min-tokens": int,
    "logprobs": int,
    "priority": int,
    "max-time-s": float,
    "max-queue-time-s": float,
}
"""Flags that are one number: the client's keyword with hyphens."""
WORDS = ("regex", "cache-salt", "request-id", "model")
"""Flags that are one string."""
SWITCHES = (
    "parse-special",
    "ignore-eos",
    "include-stop",
    "json-object",
    "cache-bypass",
    "with-token-ids",
)
FILES = ("json-schema", "grammar")
"""Flags that name a file whose text is the value."""
EXIT_WORD = "/exit"
RESET_WORD = "/reset"
_KEPT_CONTROLS = frozenset("\n\t")


def run(arguments: Sequence[str]) -> int:
    """Stream an answer to the terminal, or hold a conversation."""
    try:
        return _run(_parser().parse_args(arguments))
    except KeyboardInterrupt:
        return status.INTERRUPTED
    except UnicodeDecodeError as error:
        connect.complain(f"stdin is no text: {error.reason} at byte {error.start}")
        return status.USAGE


def _run(options: argparse.Namespace) -> int:
    try:
        settings = connect.settings(options)
        asked = _asked(options)
        # A broken stream goes on, but whoever has no server to begin with is told so at once.
        resume = Resume(start_s_max=0.0) if options.resume and asked.get("n", 1) == 1 else False
        client = Client(**settings, resume=resume)
    except (OSError, ValueError) as error:
        connect.complain(str(error))
        return status.USAGE
    with client:
        show = _show_json if options.json else _show_text
        call = _Call(client, asked, options.timeout, show)
        if options.chat and options.prompt is None:
            return _converse(call, options.system, sys.stdin)
        prompt = sys.stdin.read() if options.prompt in (None, "-") else options.prompt
        if not options.chat:
            return call.ask(prompt=prompt)
        return call.ask(chat=[*_system(options.system), ("user", prompt)])


@dataclasses.dataclass(slots=True)
class _Call:
    """The same request with one input after another."""

    client: Client
    asked: Mapping[str, Any]
    timeout_s: float | None
    show: Callable[[Iterator[Delta]], None]
    said: str = ""
    """The text of the last answer, or what there was of it."""

    def ask(self, **input_: Any) -> int:
        """Print the answer; the exit status."""
        self.said = ""
        try:
            with self.client.generate(**input_, **self.asked, timeout_s=self.timeout_s) as stream:
                self.show(self._remember(stream))
        except EmberlineError as error:
            self._end_line()
            connect.complain(error)
            return status.UNREACHABLE if isinstance(error, errors.UnavailableError) else status.FAILED
        except (OverflowError, TypeError, ValueError) as error:  # a number that no field can hold
            connect.complain(f"this can be no request: {error}")
            return status.USAGE
        self._end_line()
        return status.DONE

    def _remember(self, stream: Iterator[Delta]) -> Iterator[Delta]:
        for delta in stream:
            self.said += delta.text
            yield delta

    def _end_line(self) -> None:
        """So that what comes next, a shell's prompt or our own, begins a line."""
        if sys.stdout.isatty() and self.said and not self.said.endswith("\n"):
            print()


def _converse(call: _Call, system: str | None, lines: TextIO) -> int:
    """A turn for each line. Ctrl-C ends the answer, not the conversation; what there was of it is remembered."""
    history = _system(system)
    last = status.DONE
    if lines.isatty():
        print(f"{RESET_WORD} begins anew, {EXIT_WORD} or Ctrl-D ends; Ctrl-C stops an answer", file=sys.stderr)
    while (line := _next_line(lines)) is not None:
        if line.strip() == EXIT_WORD:
            break
        if line.strip() == RESET_WORD:
            history = _system(system)
        if line.strip() in ("", RESET_WORD):
            continue
        history.append(("user", line))
        try:
            last = call.ask(chat=history)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            last = status.DONE
        if call.said:
            history.append(("assistant", call.said))
            if call.show is _show_text and not sys.stdout.isatty() and not call.said.endswith("\n"):
                print(flush=True)  # the next answer is not this one's rest
        else:
            history.pop()  # it was not answered: two turns of one speaker are no conversation
    return last


def _next_line(lines: TextIO) -> str | None:
    if not lines.isatty():
        line = lines.readline()
        return line.rstrip("\n") if line else None
    try:
        return input("> ")
    except EOFError:
        print(file=sys.stderr)
        return None


def _system(content: str | None) -> list[tuple[str, str]]:
    return [] if content is None else [("system", content)]


def _show_text(deltas: Iterator[Delta]) -> None:
    """The text as it comes; of several sequences each begins with its number, one after another."""
    by_index: dict[int, list[str]] = {}
    plain = _for_terminal if sys.stdout.isatty() else str
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta.text)
        if delta.index == 0:
            print(plain(delta.text), end="", flush=True)
    for index in sorted(by_index.keys() - {0}):
        print(f"\n--- {index}\n{plain(''.join(by_index[index]))}", end="", flush=True)


def _show_json(deltas: Iterator[Delta]) -> None:
    """One JSON object a line for each delta; what is absent is left out."""
    for delta in deltas:
        fields = dataclasses.asdict(delta)
        print(json.dumps({name: value for name, value in fields.items() if value not in (None, ())}), flush=True)


def _for_terminal(text: str) -> str:
    """A model may have been made to say a terminal's control sequences; here they stay text."""
    return "".join(char if char.isprintable() or char in _KEPT_CONTROLS else "\ufffd" for char in text)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Client.generate`: the flags that were given. Raises OSError, ValueError."""
    names = [name.replace("-", "_") for name in (*SAMPLING, *WORDS, *SWITCHES)]
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    for name in FILES:
        path: Path | None = getattr(options, name.replace("-", "_"))
        if path is not None:
            asked[name.replace("-", "_")] = path.read_text()
    for name in ("stop", "choice"):
        if getattr(options, name):
            asked[name] = getattr(options, name)
    return asked


def _parser() -> connect.Parser:
    parser = connect.Parser(
        prog="emberline generate",
        description="Streams an answer to the terminal. Exit status: 0 the answer is whole, 1 the server answered with "
        "an error, 2 it cannot be reached or cannot serve now (UNAVAILABLE), 64 wrong flags, 130 interrupted.",
    )
    parser.add_argument("prompt", nargs="?", help="what to continue; absent or `-`: stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message; without one, a conversation: a turn for each line of stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system's message, with --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for each delta")
    parser.add_argument("--timeout", type=connect.positive, metavar="S", help="seconds for a whole answer")
    parser.add_argument(
        "--no-resume", dest="resume", action="store_false", help="a broken stream is an error; else it goes on"
    )
    group = parser.add_argument_group(
        "request",
        "absent ones are the server's defaults; it refuses what is out of bounds. What `--logprobs` and "
        "`--with-token-ids` ask for is shown with `--json`",
    )
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N")
    for name in WORDS:
        group.add_argument(f"--{name}", metavar="TEXT")
    for name in SWITCHES:
        group.add_argument(f"--{name}", action="store_true", default=None)
    for name in FILES:
        group.add_argument(f"--{name}", type=Path, metavar="FILE")
    group.add_argument("--stop", action="append", metavar="TEXT", help="a stop string; may be repeated")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of the answers allowed; may be repeated")
    connect.add_flags(parser)
    return parser
