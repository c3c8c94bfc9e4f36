"""How many threads compute, where it is not as many as there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread for many small operations.

    A team gains them little, and loses 8 ms in each whenever its other core is taken: its threads spin at barriers.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
