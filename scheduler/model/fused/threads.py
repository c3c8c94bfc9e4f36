"""What the threads of one parallel region need to work in phases: a barrier, and calls by address.

What lives here: atomics, waiting, calls of C functions from numba code. What must not: arithmetic.

A barrier is waited for twice over: a while at work (`pause`), for the others are mostly a microsecond behind; then
asleep in the kernel (futex(2)), for another program may have one of the cores, and a thread that spins there keeps it
from being moved to a free one. OpenMP's own regions sleep at once or spin for ever; see docs/benchmarks.md.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from scheduler.model.attention.simd import I32, I64

SPINS_MAX = 1500
"""Pauses before a thread sleeps: about 30 µs, a wake-up's cost."""
_MACHINE = platform.machine().lower()
FUTEX_SYSCALL = {"x86_64": 202, "amd64": 202, "aarch64": 98}.get(_MACHINE, 0) if sys.platform == "linux" else 0
"""Its number; 0 where threads only spin."""
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_WAKE_ALL = 2**31 - 1

BARRIER_WORDS = 32
"""int64s of a barrier's memory: arrivals at 0, sleepers at 8, the longest sleep (a timespec) at 16."""
SLEEP_NS_MAX = 2_000_000
"""Of one sleep: a bound, not a plan; whoever comes last wakes the others."""
_WORD_BYTES = 8


@intrinsic
def add_and_fetch(typingctx, address, amount):
    """Atomically adds to the int64 at `address`; returns the sum. Orders all memory accesses around it."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.add(builder.atomic_rmw("add", pointer, args[1], "seq_cst"), args[1])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typingctx, address):
    """The int64 at `address`; what its writer wrote before is seen after."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tells the processor that this thread spins."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, _args: Sequence[ir.Value]) -> ir.Value:
        if _MACHINE in {"x86_64", "amd64"}:
            function_type = ir.FunctionType(ir.VoidType(), [])
            function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause")
            builder.call(function, [])
        elif _MACHINE == "aarch64":
            function_type = ir.FunctionType(ir.VoidType(), [I32])
            function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.aarch64.hint")
            builder.call(function, [I32(1)])  # yield
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_with_address(typingctx, function, argument):
    """Calls the C function `void f(void *)` at address `function`."""

    def codegen(context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], byte_pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_for_int(typingctx, function):
    """Calls the C function `int f(void)` at address `function`."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        function = builder.inttoptr(args[0], ir.FunctionType(I32, []).as_pointer())
        return builder.sext(builder.call(function, []), I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_syscall(typingctx, function, number, a, b, c, d):
    """Calls libc's `long syscall(long number, ...)` at address `function` with four arguments."""

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        function_type = ir.FunctionType(I64, [I64], var_arg=True)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        return builder.call(function, list(args[1:]))

    return types.int64(*[types.int64] * 6), codegen


@njit
def wait_for_all(barrier, target, syscall):
    """Returns once `target` threads have arrived at `barrier` since it was zeroed, this one included.

    `syscall`: address of libc's function, 0 where threads may only spin.
    """
    sleepers = barrier + 8 * _WORD_BYTES
    if add_and_fetch(barrier, 1) >= target:
        if syscall != 0 and load_acquire(sleepers) > 0:
            call_syscall(syscall, FUTEX_SYSCALL, barrier, _FUTEX_WAKE_PRIVATE, _WAKE_ALL, 0)
        return
    spins = 0
    while load_acquire(barrier) < target:
        spins += 1
        if syscall == 0 or spins < SPINS_MAX:
            pause()
            continue
        add_and_fetch(sleepers, 1)
        arrived = load_acquire(barrier)
        if arrived < target:
            # Sleeps only if nobody has arrived since. A number of arrivals fits its low half, which a futex is.
            call_syscall(syscall, FUTEX_SYSCALL, barrier, _FUTEX_WAIT_PRIVATE, arrived, barrier + 16 * _WORD_BYTES)
        add_and_fetch(sleepers, -1)
