"""The servers of the end-to-end tests: one for all that leave it as they found it, and as many as a test starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.harness import ReflectionClient, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The default model with the default flags. A test that kills, stops or drains takes `start_server` instead."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[ReflectionClient]:
    """A client of the shared server."""
    with ReflectionClient(server.address) as connected:
        yield connected


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(max_num_seqs=4)`: a server of the test's own, serving already; ended with the test."""
    with ExitStack() as running:

        def start(*arguments: str, **options: Any) -> Server:
            return running.enter_context(Server(*arguments, **options))

        yield start
