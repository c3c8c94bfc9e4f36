"""The client against the real server, with the wire between them cut: what a fake cannot show is the text."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from emberline.client import Client, Delta, errors
from tests.e2e.harness import CALL_TIMEOUT_S, Server

MAX_TOKENS = 32
CUTS = (1, 2, 5, 11, 23, 31)
"""After so many deltas."""
ASKS: dict[str, dict[str, Any]] = {
    "characters of several bytes": {
        "prompt": "Emojis in a row: 😀🚀🌍🎉 日本語の文章: 今日はとても良い天気です。 More: 😀🚀🌍🎉 日本語",
        "temperature": 0,
    },
    "a stop string in sight again and again": {
        "prompt": "one, two, three, one, two, three, one, two, three, one, two,",
        "temperature": 0,
        "stop": [", one, two, four", " three, one, two, five", "three, one, three"],
    },
    "a stop string that comes": {
        "prompt": "Days of the week: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Again: Monday,",
        "temperature": 0,
        "stop": ["Saturday, Sunday"],
    },
    "penalties": {
        "prompt": "a b c d a b c d a b",
        "temperature": 0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
    },
    "logprobs": {"prompt": "Once upon a time", "temperature": 0, "logprobs": 2},
}


class Wire:
    """A relay to a server, whose connections can be cut at any moment."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """All connections there are, both ends; new ones may come."""
        with self._lock:
            for one in self._sockets:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # its other end was first
                finally:
                    one.close()
            self._sockets.clear()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return  # closed
            theirs = socket.create_connection(self._server)
            with self._lock:
                self._sockets |= {ours, theirs}
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return  # cut


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    with Wire(server.address) as relay:
        yield relay


def read(client: Client, ask: dict[str, Any], wire: Wire | None = None, cuts: tuple[int, ...] = ()) -> list[Delta]:
    deltas = []
    options = {**ask, "max_tokens": MAX_TOKENS, "with_token_ids": True}
    for delta in client.generate(options.pop("prompt"), timeout_s=CALL_TIMEOUT_S, **options):
        deltas.append(delta)
        if wire is not None and len(deltas) in cuts:
            wire.cut()
    return deltas


def summary(deltas: list[Delta]) -> tuple[Any, ...]:
    """All that a caller has in the end, but for floating-point figures."""
    ids = [token.id for delta in deltas for token in delta.tokens]
    finishes = [delta.finish for delta in deltas if delta.finish]
    usages = [(delta.usage.prompt, delta.usage.completion) for delta in deltas if delta.usage]
    prompts = [delta.prompt.count for delta in deltas if delta.prompt]
    return "".join(delta.text for delta in deltas), ids, finishes, usages, prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKS)
def test_a_cut_wire_changes_nothing(server: Server, wire: Wire, name: str) -> None:
    """Cut again and again, the stream has the text, tokens, finish and usage of an undisturbed one: what the server
    held back at a cut, half a character or the begin of a stop string, is neither lost nor said twice.
    """
    with Client(server.address) as client:
        undisturbed = summary(read(client, ASKS[name]))
    with Client(wire.address, resume=True) as client:
        deltas = read(client, ASKS[name], wire, CUTS)
    assert summary(deltas) == undisturbed
    assert len({delta.request_id for delta in deltas}) == 1
    if "logprobs" in ASKS[name]:
        assert all(len(token.top) == 2 for delta in deltas for token in delta.tokens)


@pytest.mark.slow
def test_a_drawn_seed_is_kept(server: Server, wire: Wire) -> None:
    """A sampled stream goes on with the seed that its first server drew: it is the stream of that seed."""
    ask = {"prompt": "Once upon a time", "temperature": 1.0}
    with Client(wire.address, resume=True) as client:
        deltas = read(client, ask, wire, CUTS)
    assert deltas[0].prompt is not None
    with Client(server.address) as client:
        undisturbed = read(client, {**ask, "seed": deltas[0].prompt.seed})
    assert summary(deltas) == summary(undisturbed)


def test_without_resume_the_cut_is_told(wire: Wire) -> None:
    """UNAVAILABLE, at once."""
    with Client(wire.address) as client, pytest.raises(errors.UnavailableError):
        read(client, {"prompt": "Once upon a time"}, wire, CUTS[:1])


@pytest.mark.slow
def test_an_engines_death_is_mended_by_its_server(start_server: Callable[..., Server]) -> None:
    """A stream that was in the dying step may be the killer, and must be sent to nobody: with resume it asks its server
    to replay it, which knows whom it suspects. The caller sees one stream, and the client has sent one request.
    """
    server = start_server(threads=1, num_kv_blocks=256)
    ask = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
    with Client(server.address, resume=True) as client:
        undisturbed = summary(read(client, ask))
        deltas = []
        with client.generate(
            ask["prompt"],
            temperature=0,
            ignore_eos=True,
            max_tokens=MAX_TOKENS,
            with_token_ids=True,
            timeout_s=CALL_TIMEOUT_S,
        ) as stream:
            for delta in stream:
                deltas.append(delta)
                if len(deltas) == 3:
                    os.kill(server.engine_pid(), signal.SIGKILL)
            assert stream.num_resumes == 0
    assert summary(deltas) == undisturbed
    server.wait_for_log("fatal error")
    assert len(server.fatal_errors) == 1
