"""Faults that no signal can cause, put into an engine process from outside.

Python imports a module of this name at its start if it lies on PYTHONPATH. In an engine process, and in no other, it
waits for the module of the model runner and wraps `ModelRunner.execute`: a step looks for the file that FAULT_FILE
names, and commits the fault whose name is in it. The product knows nothing of this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

RUNNER = "scheduler.model.model_runner"


class InjectedError(Exception):
    """What the `exception` and `thread` faults raise."""


def _raise() -> None:
    raise InjectedError("a fault made by a test")  # the test looks for this line in the traceback


def _raise_and_linger() -> None:
    """Fails, but does not end: it must be ended. The message is far longer than a log should hold."""
    os._exit = lambda status: time.sleep(3600)  # type: ignore[assignment]
    raise InjectedError("a long fault made by a test " + "x" * 100_000)


def _end_a_thread() -> None:
    helper = threading.Thread(target=_raise, name="helper")
    helper.start()
    helper.join()


FAULTS = {
    "exception": _raise,
    "linger": _raise_and_linger,
    "thread": _end_a_thread,
    "exit 0": lambda: os._exit(0),
}


def _kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


POISONS = {"raise": _raise, "kill": _kill_myself}
"""What `poison HOW TOKEN` does in each step that takes in a sequence with that token."""


def _commit(fault: str, fault_file: Path, plan: Any) -> None:
    match fault.split():
        case ["once"]:
            fault_file.unlink()
            _raise()
        case ["poison", how, token]:
            if any(int(token) in new.token_ids for new in plan.new):
                POISONS[how]()
        case _:
            FAULTS[fault]()


def _wrap(runner: Any, fault_file: Path) -> None:
    execute = runner.execute

    def execute_or_fail(self: Any, plan: Any) -> Any:
        if fault_file.exists():
            _commit(fault_file.read_text(), fault_file, plan)
        return execute(self, plan)

    runner.execute = execute_or_fail


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, fault_file: Path) -> None:
        self._loader = loader
        self._fault_file = fault_file

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        _wrap(module.ModelRunner, self._fault_file)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, fault_file: Path) -> None:
        self._fault_file = fault_file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader, self._fault_file)
        return spec


if "FAULT_FILE" in os.environ and "scheduler.engine.process" in sys.orig_argv:
    sys.meta_path.insert(0, _Finder(Path(os.environ["FAULT_FILE"])))
