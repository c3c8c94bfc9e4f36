"""TLS as callers meet it: authorities, names, certificates of their own, for one server and for several."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from emberline.client import AsyncClient, Client, Tls, errors
from emberline.commands.main import main
from tests.client.fake_server import LIMIT_S, FakeServer, word

TEN_WORDS = "".join(map(word, range(10)))
NAME = "emberline.test"


@dataclass(frozen=True)
class Papers:
    """An authority's, in files and as a server takes them."""

    ca: Path
    cert: Path
    key: Path
    server: grpc.ServerCredentials


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    caller = authority.issue_cert("caller.test")
    caller.private_key_pem.write_to_path(folder / "key.pem")
    for blob in caller.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    served = authority.issue_cert(NAME)
    pair = (served.private_key_pem.bytes(), b"".join(blob.bytes() for blob in served.cert_chain_pems))
    server = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
    return Papers(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", server)


def test_mutual_tls(papers: Papers) -> None:
    """With the authority, the name and a certificate of its own a caller is let in, sync and asyncio, and its token
    goes along; a list of servers has the one name, and balances.
    """
    tls = Tls(papers.ca, papers.cert, papers.key)
    with FakeServer(credentials=papers.server) as one, FakeServer(credentials=papers.server) as other:
        target = [one.address, other.address]
        with Client(target, tls=tls, server_name=NAME, token="secret") as client:
            for _ in range(8):
                assert client.complete("x", timeout_s=LIMIT_S).text == TEN_WORDS
            assert client.health(timeout_s=LIMIT_S) == "SERVING"

        async def ask() -> str:
            async with AsyncClient(one.address, tls=tls, server_name=NAME) as client:
                return (await client.generate("x", timeout_s=LIMIT_S).answer()).text

        assert asyncio.run(ask()) == TEN_WORDS
        assert {sent.get("authorization") for sent in other.metadata} <= {"Bearer secret"}
        assert one.num_calls + other.num_calls == 9


def test_who_is_not_let_in(papers: Papers) -> None:
    """Without a certificate of its own, with another name, or without trust in the authority: UNAVAILABLE, no call."""
    whole = Tls(papers.ca, papers.cert, papers.key)
    with FakeServer(credentials=papers.server) as server:
        for tls, name in ((Tls(papers.ca), NAME), (whole, "other.test"), (whole, None), (Tls(), NAME), (None, None)):
            with (
                Client(server.address, tls=tls, server_name=name, attempts_max=1) as client,
                pytest.raises(errors.UnavailableError),
            ):
                client.complete("x", timeout_s=LIMIT_S)
    assert server.num_calls == 0


def test_the_commands_flags(papers: Papers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same by the command line."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    flags = ["--tls-ca", papers.ca, "--tls-cert", papers.cert, "--tls-key", papers.key, "--tls-server-name", NAME]
    with FakeServer(credentials=papers.server) as server:
        where = [*map(str, flags), "--address", server.address, "--token-file", str(token)]
        assert main(["health", *where]) == 0
        assert main(["generate", "x", *where]) == 0
        assert main(["health", "--address", server.address, "--timeout", "5"]) == 2
    assert server.metadata[0]["authorization"] == "Bearer secret"
    assert capsys.readouterr().out == f"SERVING\n{TEN_WORDS}"
