"""A crash report for the person on call, on one screen: what happened, where, over which requests, and what to do.

What lives here: the classes of death, the advice for each, and the layout. What must not: I/O, knowledge of a running
server; all it has is the report. A report may come from a newer server, or from a hand that changed it: what is missing
or of another type is left out, and nothing in it reaches a terminal but printable characters.
"""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

LINES_MAX = 40
COLUMNS_MAX = 100
COLUMNS_MIN = 60
# Without the evidence, which gets what is left, these add up to 37 lines at most.
HAPPENED_LINES_MAX = 3
FOUND_LINES_MAX = 2
REQUESTS_SHOWN_MAX = 4
ADVICE_MAX = 3
ADVICE_LINES_MAX = 4
SCHEMA = 1

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$')
_OUR_ENTRY = "scheduler/engine/process.py"
_CURRENT = "Current thread 0x"
_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")


class NoReportError(ValueError):
    """The text is no report; the message says why."""


class Death(Enum):
    """The classes that there is advice for."""

    OUT_OF_MEMORY = auto()
    """The kernel's OOM killer."""
    HANG = auto()
    EXCEPTION = auto()
    EXCEPTION_MEMORY = auto()
    NATIVE = auto()
    """A signal that a process brings on itself."""
    KILLED = auto()
    """SIGKILL, neither by us nor, as far as known, by the kernel."""
    SIGNALLED = auto()
    """Any other signal."""
    LOST = auto()
    """It lived, but its connection broke."""
    EXIT_ZERO = auto()
    EXIT_OTHER = auto()
    UNKNOWN = auto()


_NATIVE_SIGNALS = {
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGBUS": "mapped memory was not there: a file cut short, or no room for it",
    "SIGABRT": "native code gave up by itself (a failed check, a corrupted heap)",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGFPE": "native code divided by zero, or the like",
    "SIGTRAP": "native code hit a trap",
    "SIGSYS": "a system call that is forbidden here (seccomp)",
}

_ADVICE = {
    Death.OUT_OF_MEMORY: """
Need less: a smaller --kv-cache-memory or --num-kv-blocks (the KV pool), --max-num-batched-tokens and --max-num-seqs
(the largest step), fewer --replicas, --standby 0.

Or allow more: the control group's limit (memory.max, the pod's limits) or the machine's memory.

The count is that of the whole control group: `journalctl -k` or `dmesg` names whom the kernel chose and why.
""",
    Death.HANG: """
The stack shows where it stood, the innermost frame first. A lock or a wait there is a bug: report it.

If it was computing, the machine may be too busy for the step: compare the load with --threads and --replicas, make
steps smaller (--max-num-batched-tokens), or raise --step-deadline.

It could not give its Python stack any more: it was stopped from outside (SIGSTOP, a debugger, a frozen control group),
or held up in native code that never let go of the interpreter's lock, or in the kernel.
""",
    Death.EXCEPTION: """
A bug of the engine, of the model's code or of a library: report the traceback with the versions installed.

If the same request is a suspect in the next report too, it brings it about: its caller has the prompt.
""",
    Death.EXCEPTION_MEMORY: """
It could not get the memory for a step: make the KV pool smaller (--kv-cache-memory, --num-kv-blocks; on a GPU
--gpu-memory-utilization), or the steps (--max-num-batched-tokens, --max-num-seqs).

Look for what else uses the memory: another process on the GPU, RLIMIT_AS, the control group.
""",
    Death.NATIVE: """
Not Python but what it called failed: torch, numba, a kernel, a driver. The frames show the Python above it.

Narrow it down: --attention-backend reference, --threads 1, another version of torch. If it comes at a different place
each time, test the machine's memory; `dmesg` shows hardware and driver errors.

If the same request is a suspect in the next report too, it brings it about: its caller has the prompt.
""",
    Death.KILLED: """
Find who sent it: an administrator, a container runtime, a memory daemon (systemd-oomd, earlyoom), a script.
`journalctl` around the time above tells, or the audit log.

To stop the server, send SIGTERM to its own process, not to the engine's: it lets streams finish.
""",
    Death.SIGNALLED: """
Find who sent it. To stop the server, signal its own process, not the engine's: it lets streams finish.

SIGXCPU and SIGXFSZ come from resource limits (ulimit -t, -f), SIGHUP from a terminal that went away.
""",
    Death.LOST: """
The engine was alive and was killed because the server could not talk to it any more. This is a bug, or other software
in that process closed descriptors or wrote into them: report it with this file.
""",
    Death.EXIT_ZERO: """
Something in the engine's process ended it as if all were well: look for exit calls in the model's own code
(--trust-remote-code), in plugins and in a sitecustomize.

If its last lines do not tell, run with --log-level debug: what the process prints is then in the log.
""",
    Death.EXIT_OTHER: """
It ended itself without a report: its last lines are all that it said. Status 126 or 127 means that the interpreter
could not be started, 1 that Python gave up before the engine's own boundary was there.
""",
    Death.UNKNOWN: """
The process could not be reaped in time: it may hang in the kernel (a dead disk or network mount, a driver).
`ps -o stat,wchan` of the pid above shows it as long as it does.
""",
}
"""Paragraphs, the most important first."""

_BUS_ADVICE = "Weights are memory-mapped: was the model's directory changed or its disk lost? Is /dev/shm full?"
_UNCOUNTED_ADVICE = "This system does not count OOM kills for us: look into `dmesg` or `journalctl -k` first."
_STARTING_ADVICE = """
It had not served yet: no request has a part in it. Check the model's files, free memory and the versions of torch and
its libraries; `emberline serve --max-engine-restarts 0 --log-level debug` shows a start by itself."""
_POISON_ADVICE = """
Find the caller by the label above: only there is the prompt. Whoever sends the same request is refused for ten minutes
(INTERNAL, POISON_REQUEST), so it does no more harm; keep it to reproduce the bug."""


def parse(text: str) -> dict[str, Any]:
    """The report in a file's text.

    Raises:
        NoReportError: it is none, or one that this version cannot read.
    """
    try:
        report = json.loads(text)
    except ValueError:
        raise NoReportError("it is no JSON") from None
    except RecursionError:
        raise NoReportError("its JSON is nested too deeply") from None
    if not isinstance(report, dict) or not isinstance(report.get("death_id"), str) or "schema" not in report:
        raise NoReportError("it is no crash report")
    if report["schema"] != SCHEMA:
        raise NoReportError(f"it is of schema {json.dumps(report['schema'])[:20]}; this version reads {SCHEMA}")
    return report


def render(report: Mapping[str, Any], width: int = COLUMNS_MAX) -> str:
    """The screen: at most LINES_MAX lines of at most `width` columns (itself at most COLUMNS_MAX)."""
    width = min(max(width, COLUMNS_MIN), COLUMNS_MAX)
    death = classify(report)
    title = f"ENGINE DEATH {_text(report, 'death_id')}"
    before = [
        title,
        "  " + _joined(_moment(report), "emberline-server " + (_text(report, "server_version") or "?")),
        "WHAT HAPPENED",
        *_wrapped(_what_happened(report, death), width, HAPPENED_LINES_MAX),
        *_wrapped(_joined(_ending(report), "found by: " + (_text(report, "cause") or "?")), width, FOUND_LINES_MAX),
        "WHERE IT WAS",
        *_where(report),
        *_requests(report),
    ]
    after = [*_memory(report), *_aftermath(report), "WHAT TO DO"]
    for number, advice in enumerate(_advice(report, death), 1):
        after += _wrapped(advice, width, ADVICE_LINES_MAX, f"{number}. ")
    evidence = _evidence(report, death, LINES_MAX - len(before) - len(after))
    return "\n".join(_cut(line, width) for line in [*before, *evidence, *after])


def classify(report: Mapping[str, Any]) -> Death:
    """Of which kind this death was."""
    signal, status, oom_kills = _text(report, "signal"), _number(report, "exit_status"), _number(report, "oom_kills")
    if report.get("was_hung") is True:
        return Death.HANG
    exception_type = _text(report, "exception", "type")
    if exception_type:
        is_memory = exception_type.rpartition(".")[2] in _MEMORY_ERRORS
        return Death.EXCEPTION_MEMORY if is_memory else Death.EXCEPTION
    if signal in _NATIVE_SIGNALS:
        return Death.NATIVE
    if signal == "SIGKILL" and oom_kills:
        return Death.OUT_OF_MEMORY
    if report.get("was_killed_by_us") is True:
        return Death.LOST
    if signal:
        return Death.KILLED if signal == "SIGKILL" else Death.SIGNALLED
    if status is None:
        return Death.UNKNOWN
    return Death.EXIT_OTHER if status else Death.EXIT_ZERO


# What is said


def _what_happened(report: Mapping[str, Any], death: Death) -> str:
    signal = _text(report, "signal")
    words = {
        Death.OUT_OF_MEMORY: "The kernel killed it because memory ran out (SIGKILL, and the OOM killer was at work).",
        Death.HANG: "It hung: no progress within the deadline. The server killed it.",
        Death.EXCEPTION: f"Python exception: {_exception(report)}",
        Death.EXCEPTION_MEMORY: f"It could not get memory: {_exception(report)}",
        Death.NATIVE: f"{signal}: {_NATIVE_SIGNALS.get(signal, '')}.",
        Death.KILLED: "SIGKILL from outside: somebody killed it, not this server."
        if _number(report, "oom_kills") is not None
        else "SIGKILL: somebody killed it, not this server, or the kernel did because memory ran out.",
        Death.SIGNALLED: f"{signal} from outside, or by a limit.",
        Death.LOST: "The connection to it broke while it lived; the server killed it.",
        Death.EXIT_ZERO: "It ended itself with exit status 0, though nobody had told it to stop.",
        Death.EXIT_OTHER: f"It ended itself with exit status {report.get('exit_status')}, without a last word.",
        Death.UNKNOWN: "How it ended is not known: it could not be reaped in time.",
    }[death]
    if _is_starting(report):
        words = f"It died while starting. {words}"
    if (killer := _number(report, "blame", "killer")) is not None:
        words += f" Request #{killer} did it: the second time, and alone in the step."
    return words


def _exception(report: Mapping[str, Any]) -> str:
    message = " ".join(_text(report, "exception", "message").split())
    return f"{_text(report, 'exception', 'type')}: {message[:200]}"


def _ending(report: Mapping[str, Any]) -> str:
    signal, status, oom_kills = _text(report, "signal"), _number(report, "exit_status"), _number(report, "oom_kills")
    by_us = " (ours)" if report.get("was_killed_by_us") is True else ""
    ending = f"{signal}{by_us}" if signal else "not reaped" if status is None else f"exit status {status}"
    return _joined(ending, "OOM kills " + ("not told" if oom_kills is None else str(oom_kills)))


_FACTS = (("model", "model"), ("dtype", "in"), ("device", "on"), ("attention_backend", "attention"))
"""Of the engine, and the word before each."""


_SHAPE = (
    ("num_seqs", "sequences"),
    ("num_batched_tokens", "tokens"),
    ("num_new", "new"),
    ("num_preempted", "preempted"),
)


def _where(report: Mapping[str, Any]) -> list[str]:
    uptime_s = _number(report, "engine", "uptime_s")
    lines = [
        _joined(
            f"replica {_number(report, 'engine', 'index') or 0}",
            f"pid {_number(report, 'engine', 'pid')}",
            "" if uptime_s is None else f"up {_duration(uptime_s)}",
            "starting" if _is_starting(report) else "serving",
        ),
        _joined(*(_text(report, "engine", key) and f"{word} {_text(report, 'engine', key)}" for key, word in _FACTS)),
        f"phase {_text(report, 'phase') or '?'}"
        + ("" if _is_starting(report) else f" of step {_number(report, 'step_id') or 0}"),
    ]
    steps = [step for step in _list(report, "steps") if isinstance(step, Mapping)]
    if steps:
        shape = ", ".join(_counted(_number(steps[0], key) or 0, word) for key, word in _SHAPE)
        lines.append(f"step {_number(steps[0], 'step_id') or 0}: {shape}")
        earlier = ", ".join(f"{_number(step, 'num_batched_tokens') or 0}" for step in steps[1:5])
        if earlier:
            lines[-1] += f" · before it {earlier} tokens"
    return [f"  {line}" for line in lines if line]


def _requests(report: Mapping[str, Any]) -> list[str]:
    requests = [request for request in _list(report, "requests") if isinstance(request, Mapping)]
    count = max(_number(report, "num_requests") or 0, len(requests))
    if not count:
        return ["WHICH REQUESTS", "  none was being computed, as far as is known"]
    killer = _number(report, "blame", "killer")
    meaning = "one of them may be the cause, or none" if killer is None else "the killer is known"
    lines = ["WHICH REQUESTS", f"  {count} in the dying step; {meaning}"]
    requests.sort(key=lambda request: _number(request, "request_id") != killer)
    for request in requests[:REQUESTS_SHOWN_MAX]:
        number = _number(request, "request_id")
        counts = [_number(request, key) for key in ("num_prompt_tokens", "num_output_tokens")]
        lines.append(
            "  "
            + _joined(
                f"#{number} {_text(request, 'label') or '(caller gone)'}",
                "" if None in counts else f"{counts[0]} prompt + {counts[1]} output tokens",
                "alone, as a suspect" if request.get("was_alone") is True else "",
                "KILLER" if killer is not None and number == killer else "",
            )
        )
    if count > REQUESTS_SHOWN_MAX:
        lines.append(f"  and {count - min(len(requests), REQUESTS_SHOWN_MAX)} more (--json lists up to 64)")
    return lines


def _evidence(report: Mapping[str, Any], death: Death, room: int) -> list[str]:
    """What tells most of the process's own words, with a heading; nothing, if there is nothing or no room for it."""
    stacks, traceback = _text(report, "stacks"), _text(report, "exception", "traceback")
    lines = [line for line in _list(report, "last_lines") if isinstance(line, str) and line.strip()]
    fatal = _fatal_error(lines)
    if death is Death.HANG and stacks:
        heading, shown = "PYTHON STACK (innermost first)", _thread(stacks.splitlines(), _OUR_ENTRY)[: room - 1]
    elif traceback:
        heading, shown = "TRACEBACK (its end)", [line for line in traceback.splitlines() if line.strip()][1 - room :]
    elif fatal:
        heading, shown = "ITS LAST WORDS (innermost frame first)", fatal[: room - 1]
    else:
        heading, shown = "ITS LAST LINES ON STDERR", lines[1 - room :]
    return [heading, *(f"  {_frame(line)}" for line in shown)] if shown and room > 1 else []


def _fatal_error(lines: list[str]) -> list[str]:
    """What faulthandler wrote at a fatal signal, of all threads the one that had it."""
    titles = [line for line in lines if line.startswith("Fatal Python error")]
    if not titles and not any(line.startswith(_CURRENT) for line in lines):
        return []
    return [*titles[-1:], *_thread(lines, _CURRENT)]


def _thread(lines: Iterable[str], mark: str) -> list[str]:
    """Of several threads' stacks the one with `mark` in it, else the first."""
    threads: list[list[str]] = []
    is_within = False
    for line in lines:
        is_head = line.startswith(("Thread 0x", _CURRENT))
        if is_head:
            threads.append([])
        is_within = is_head or (is_within and line.startswith("  "))
        if is_within:
            threads[-1].append(line)
    marked = [thread for thread in threads if any(mark in line for line in thread)]
    return next(iter(marked or threads), [])


def _frame(line: str) -> str:
    """A frame of a traceback or of faulthandler, short; any other line as it is."""
    match = _FRAME.match(line)
    if match is None:
        return line.rstrip()
    path, number, function = match.groups()
    _, is_installed, below = path.rpartition("-packages/")
    return f"  {below if is_installed else '/'.join(path.split('/')[-3:])}:{number} {function}"


def _memory(report: Mapping[str, Any]) -> list[str]:
    values = {
        key: _number(report, "memory", key)
        for key in ("engine_rss_bytes", "cgroup_current_bytes", "cgroup_max_bytes", "available_bytes")
    }
    group = _bytes(values["cgroup_current_bytes"])
    if group:
        group = f"control group {group} of {_bytes(values['cgroup_max_bytes']) or 'unlimited'}"
    line = _joined(
        values["engine_rss_bytes"] is not None and f"engine {_bytes(values['engine_rss_bytes'])}",
        group,
        values["available_bytes"] is not None and f"available on the machine {_bytes(values['available_bytes'])}",
    )
    return ["MEMORY", f"  {line}"] if line else []


def _aftermath(report: Mapping[str, Any]) -> list[str]:
    delay_s = _number(report, "restart", "delay_s")
    deaths, allowed = _number(report, "restart", "num_deaths_in_window"), _number(report, "restart", "num_restarts_max")
    start = "not started again" if delay_s is None else f"restart delayed by {delay_s:.1f} s"
    window = f" ({deaths} deaths in the window, {allowed} allowed)"
    if _is_starting(report) and delay_s is None and not deaths:
        window = ": a first start is not tried a second time"
    line = _joined(
        f"streams ended {_number(report, 'streams', 'num_ended') or 0}",
        f"replayed {_number(report, 'streams', 'num_replayed') or 0}",
        start + window,
    )
    return ["AFTERWARDS", f"  {line}"]


def _advice(report: Mapping[str, Any], death: Death) -> Iterable[str]:
    """The most important first; so many that they fit."""
    advice: list[str] = []
    if _number(report, "blame", "killer") is not None:
        advice.append(_POISON_ADVICE)
    if death is Death.KILLED and _number(report, "oom_kills") is None:
        advice.append(_UNCOUNTED_ADVICE)
    if _text(report, "signal") == "SIGBUS":
        advice.append(_BUS_ADVICE)
    own = _ADVICE[death].split("\n\n")
    if death is Death.HANG:
        own = own[:2] if _text(report, "stacks") else own[2:]
    if _is_starting(report):
        return [_STARTING_ADVICE, *advice, own[0]][:ADVICE_MAX]
    return [*advice, *own][:ADVICE_MAX]


# Small things


def _counted(count: float, word: str) -> str:
    return f"{count} {word.removesuffix('s') if count == 1 else word}"


def _is_starting(report: Mapping[str, Any]) -> bool:
    return _get(report, "engine", "was_starting") is True


def _get(report: Mapping[str, Any], *keys: str) -> Any:
    value: Any = report
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _text(report: Mapping[str, Any], *keys: str) -> str:
    value = _get(report, *keys)
    return value if isinstance(value, str) else ""


def _number(report: Mapping[str, Any], *keys: str) -> int | float | None:
    value = _get(report, *keys)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -1e18 < value < 1e18 else None  # nothing that was counted is beyond, or is no number


def _list(report: Mapping[str, Any], key: str) -> list[Any]:
    value = report.get(key)
    return value if isinstance(value, list) else []


def _joined(*parts: str | bool) -> str:
    """What there is of it."""
    return " · ".join(part for part in parts if isinstance(part, str) and part)


def _moment(report: Mapping[str, Any]) -> str:
    return _text(report, "time").replace("T", " ").replace("+00:00", " UTC")


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.1f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} d"


def _bytes(count: float | None) -> str:
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _wrapped(text: str, width: int, lines_max: int, bullet: str = "") -> list[str]:
    indent = "  " + bullet
    text = " ".join(text.split())
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        max_lines=lines_max,
        placeholder=" …",
        break_on_hyphens=False,
    )


def _cut(line: str, width: int) -> str:
    """Printable characters only, and at most so many columns of a terminal."""
    shown: list[str] = []
    columns = 0
    for character in line.expandtabs(4):
        if not character.isprintable():
            character = "?"  # noqa: PLW2901 - it is what is shown instead
        wide = unicodedata.east_asian_width(character) in "WF"
        columns += 0 if unicodedata.combining(character) else 1 + wide
        if columns > width:
            return "".join(shown[:-1]) + "…" if shown and not wide else "".join(shown)
        shown.append(character)
    return "".join(shown)
