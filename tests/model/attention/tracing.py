"""Shows what a call runs: torch's operators by its profiler, Python's and C's functions by the interpreter's hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.profiler import ProfilerActivity, profile


def trace(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """The names of the operators and of the functions that `call` runs, each in order."""
    call()  # what is loaded or cached at a first call does not count
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    operators = [event.name for event in profiler.events() or ()]
    functions: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            functions.append(frame.f_code.co_qualname)
        elif event == "c_call":
            functions.append(argument.__qualname__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return operators, functions
