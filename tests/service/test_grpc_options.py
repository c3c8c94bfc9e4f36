"""gRPC takes an option that it does not know without a word: a name spelled wrong is an option that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from grpc._cython import cygrpc

from emberline.client.connection import Connection, Tls
from service import server

CORE = Path(cygrpc.__file__).read_bytes()
"""The C core's library, which has each name that it knows as a string."""


def names_of_the_client() -> set[str]:
    found: set[str] = set()

    def make(_target: str, *_credentials: object, options: list[tuple[str, object]]) -> None:
        found.update(name for name, _ in options)

    Connection("10.0.0.1,10.0.0.2", tls=Tls()).dial(make, make, for_inference=True)
    return found


def names_of_the_server() -> set[str]:
    config = SimpleNamespace(max_request_bytes=lambda: 1, enable_channelz=False)
    options = [*server._grpc_options(config), *server._HEALTH_OPTIONS]  # type: ignore[arg-type]
    return {name for name, _ in options}


@pytest.mark.parametrize("name", sorted(names_of_the_client() | names_of_the_server()))
def test_grpc_knows_the_option(name: str) -> None:
    """Every channel option of client and server ends a string of the C core (linkers merge strings by their ends)."""
    assert name.encode() + b"\0" in CORE


def test_a_name_that_grpc_does_not_know_is_found() -> None:
    """The check can fail: this one, which stands in much documentation, is the macro's name and not the option's."""
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in CORE
