"""Faults that no signal can cause, put into a server's processes from outside.

Python imports a module of this name at its start if it lies on PYTHONPATH. In a server's processes, and in no other, it
waits for the modules named below and wraps one function of each: a *place*. A place looks for the file `once-<place>`
in CHAOS_FOLDER; whoever manages to rename it commits the fault whose name is in it, once. The file `poison` makes each
step fail that computes a certain token. The file `clock` sets the wall clock off. The product knows nothing of this.

Only the standard library, and no product module is imported from here: they come when the server asks for them.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREVER_S = 3600.0


class InjectedError(Exception):
    """What the faults raise."""


# --------------------------------------------------------------------------------------------------------- the faults


def _raise() -> None:
    raise InjectedError("a fault made by the fault suite")


def _memory_error() -> None:
    raise MemoryError("a fault made by the fault suite")


def _torch_out_of_memory() -> None:
    import torch  # noqa: PLC0415 - it is there already, and in the front end it never is

    raise torch.OutOfMemoryError("a fault made by the fault suite")


def _hold_the_gil() -> None:
    """A C function that does not let go of the interpreter: no other thread runs, no Python signal handler either."""
    ctypes.PyDLL(None).sleep(int(FOREVER_S))


def _spin() -> None:
    """A loop in Python: other threads get their turns."""
    until_s = time.monotonic() + FOREVER_S
    while time.monotonic() < until_s:
        pass


def _end_a_thread() -> None:
    helper = threading.Thread(target=_raise, name="helper")
    helper.start()
    helper.join()


def _fill_a_pipe() -> None:
    """A write that blocks for ever: nobody reads the other end."""
    _, writing_end = os.pipe()
    while True:
        os.write(writing_end, b"x" * 65536)


def _exit_and_linger() -> None:
    """Fails, but does not end: it must be ended."""
    os._exit = lambda _: time.sleep(FOREVER_S)  # type: ignore[assignment,return-value]
    raise InjectedError("a fault made by the fault suite, and no end " + "x" * 100_000)


ACTIONS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "memory error": _memory_error,
    "torch out of memory": _torch_out_of_memory,
    "sleep": lambda: time.sleep(FOREVER_S),
    "hold the gil": _hold_the_gil,
    "spin": _spin,
    "thread": _end_a_thread,
    "pipe": _fill_a_pipe,
    "linger": _exit_and_linger,
    "exit 0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


class _Site:
    """One process's view of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._poisoned: set[int] = set()
        self.is_serving = "scheduler.engine.process" not in sys.orig_argv
        """Not what an engine does before it serves: a standby that warms up must not take a fault that is meant for the
        engine beside it."""

    def at(self, place: str) -> None:
        """Commit what is armed here."""
        path = f"{self._folder}/once-{place}"
        if not (self.is_serving or place == "loading") or not os.path.exists(path):  # noqa: PTH110 often, so cheaply
            return
        done = f"{self._folder}/done-{place}"
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                action = file.read()
            os.rename(path, done)  # noqa: PTH104
        except OSError:
            return  # another process was first, or another fault has taken all descriptors
        ACTIONS[action]()

    def taste(self, plan: Any) -> None:
        """Commit the poison's action if a step holds it. `plan` is a StepPlan."""
        path = f"{self._folder}/poison"
        if not os.path.exists(path):  # noqa: PTH110
            return
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                spec = json.load(file)
        except OSError:
            return  # cured just now
        self._poisoned.update(new.seq_id for new in plan.new if spec["token_id"] in new.token_ids)
        if not self._poisoned.isdisjoint(plan.seq_ids):
            ACTIONS[spec["action"]]()

    def missing(self, place: str) -> None:
        """Tell the suite that it cannot reach this place."""
        Path(f"{self._folder}/missing-{place}").touch()


# --------------------------------------------------------------------------------------------------------- the places


def _wrap(site: _Site, holder: Any, name: str, place: str) -> None:
    function = getattr(holder, name, None)
    if function is None:
        site.missing(place)
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        site.at(place)
        return function(*args, **kwargs)

    setattr(holder, name, wrapped)


def _patch_scheduler(site: _Site, module: Any) -> None:
    _wrap(site, module.Scheduler, "add_request", "admission")
    _wrap(site, module.Scheduler, "schedule", "schedule")
    _wrap(site, module.Scheduler, "update_from_output", "update")
    _wrap(site, module.Scheduler, "stats", "metrics")


def _patch_runner(site: _Site, module: Any) -> None:
    execute = module.ModelRunner.execute

    def execute_or_die(self: Any, plan: Any) -> Any:
        site.taste(plan)
        return execute(self, plan)

    module.ModelRunner.execute = execute_or_die
    _wrap(site, module.ModelRunner, "compute_logits", "forward")
    _wrap(site, module, "sample", "sampling")


def _patch_core(site: _Site, module: Any) -> None:
    step = module.EngineCore.step

    def first_step(self: Any) -> Any:
        site.is_serving = True
        module.EngineCore.step = step
        return step(self)

    module.EngineCore.step = first_step


def _patch_startup(site: _Site, module: Any) -> None:
    _wrap(site, module, "prepare", "loading")
    _wrap(site, module.PreparedModel, "activate", "loading")


def _patch_detokenizer(site: _Site, module: Any) -> None:
    _wrap(site, module.Detokenizer, "push", "detokenize")


def _patch_instruments(site: _Site, module: Any) -> None:
    _wrap(site, module.Counter, "add", "recording")
    _wrap(site, module.Histogram, "observe", "recording")


PATCHES: dict[str, Callable[[_Site, Any], None]] = {
    "scheduler.core.scheduler": _patch_scheduler,
    "scheduler.engine.engine_core": _patch_core,
    "scheduler.model.model_runner": _patch_runner,
    "scheduler.model.startup": _patch_startup,
    "service.detokenizer": _patch_detokenizer,
    "service.metrics.instruments": _patch_instruments,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[Any], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, site: _Site) -> None:
        self._site = site
        self._patches = dict(PATCHES)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.pop(name, None)  # or the search below would come here again
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda module: patch(self._site, module))
        return spec


# ---------------------------------------------------------------------------------------------------------- the clock


def _install_clock(folder: Path) -> None:
    """Replaces every way in which `time` tells the wall clock's time; the monotonic clocks stay as they are."""
    wall = time.time, time.time_ns, time.clock_gettime, time.clock_gettime_ns
    path = f"{folder}/clock"
    last_s = 0.0

    def offset_s(clock: int = time.CLOCK_REALTIME) -> float:
        nonlocal last_s
        if clock != time.CLOCK_REALTIME:
            return 0.0
        try:
            with open(path, encoding="utf-8") as file:  # noqa: PTH123
                last_s = float(file.read())
        except FileNotFoundError:
            last_s = 0.0
        except OSError:
            pass  # another fault has taken all descriptors: a clock that fails as well would be this suite's own bug
        return last_s

    time.time = lambda: wall[0]() + offset_s()
    time.time_ns = lambda: wall[1]() + int(offset_s() * 1e9)
    time.clock_gettime = lambda clock: wall[2](clock) + offset_s(clock)
    time.clock_gettime_ns = lambda clock: wall[3](clock) + int(offset_s(clock) * 1e9)


def _is_ours() -> bool:
    """Whether this process is the front end or an engine, and not the installer or a tool that they start."""
    arguments = sys.orig_argv
    is_front_end = "serve" in arguments and any(Path(argument).name == "emberline" for argument in arguments)
    return is_front_end or "scheduler.engine.process" in arguments


if "CHAOS_FOLDER" in os.environ and _is_ours():
    sys.meta_path.insert(0, _Finder(_Site(Path(os.environ["CHAOS_FOLDER"]))))
    _install_clock(Path(os.environ["CHAOS_FOLDER"]))
