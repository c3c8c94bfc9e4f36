"""Certificates: what is refused, and what gRPC is given, over real handshakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler.errors import ConfigurationError
from service.health import HealthServicer
from service.tls import Tls, TlsFiles, describe, load
from tests.certificates import Authority, Pair, day, write
from tests.service.support import HANG_S, CapturedLogs

OLD, NEW = Authority(), Authority()
SERVER = OLD.server()
CLIENT = OLD.client("client.test")
KEY_MARK = SERVER.key.splitlines()[1].decode()


def files(folder: Path, pair: Pair = SERVER, client_ca: bytes | None = None) -> TlsFiles:
    paths = write(folder, pair, client_ca)
    return TlsFiles(paths["tls_cert"], paths["tls_key"], paths.get("tls_client_ca"))


def encrypted(key: bytes) -> bytes:
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret"]
    return subprocess.run(command, input=key, capture_output=True, check=True).stdout


BAD = {
    "another's key": (Pair(SERVER.chain, OLD.server().key), None, "--tls-key: the key does not belong"),
    "no certificate": (Pair(b"text", SERVER.key), None, "--tls-cert: no PEM certificate"),
    "no key": (Pair(SERVER.chain, b"text"), None, "--tls-cert and --tls-key are no certificate and its private key"),
    "half a key": (Pair(SERVER.chain, SERVER.key[:90]), None, "--tls-cert and --tls-key are no certificate"),
    "half a certificate": (Pair(SERVER.chain[:300], SERVER.key), None, "--tls-cert: no PEM certificate"),
    "garbage in the armour": (
        Pair(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", SERVER.key),
        None,
        "--tls-cert: a certificate in that file cannot be read",
    ),
    "an empty authority": (SERVER, b"", "--tls-client-ca: no PEM certificate"),
    "a key for an authority": (SERVER, SERVER.key, "--tls-client-ca: no PEM certificate"),
    "too much": (SERVER, b"x" * (1024 * 1024 + 1), "--tls-client-ca .*: larger than"),
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_are_no_good_are_refused_by_flag(tmp_path: Path, what: str) -> None:
    """The one line names the flag, and holds nothing of the file."""
    pair, client_ca, message = BAD[what]
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(files(tmp_path, pair, client_ca))
    assert KEY_MARK not in str(caught.value)
    assert "\n" not in str(caught.value)


def self_signed(*kind: str) -> Pair:
    """A certificate with a key of this kind, made by the openssl command."""
    command = ["openssl", "req", "-x509", "-nodes", "-days", "30", "-subj", "/CN=localhost", "-keyout", "-", "-newkey"]
    command += [*kind, "-addext", "subjectAltName=IP:127.0.0.1"]
    pem = subprocess.run(command, capture_output=True, check=True).stdout
    begin = pem.index(b"-----BEGIN CERTIFICATE")
    end = pem.index(b"-----END CERTIFICATE-----") + len(b"-----END CERTIFICATE-----\n")
    return Pair(pem[begin:end], pem[:begin] + pem[end:])


@pytest.mark.parametrize("kind", ["ed25519", "P-521", "secp256k1"])
def test_a_key_that_no_handshake_would_work_with_is_refused(tmp_path: Path, kind: str) -> None:
    """OpenSSL takes these, gRPC's own library does not: the server would serve, and nobody could call."""
    pair = self_signed(*([kind] if kind == "ed25519" else ["ec", "-pkeyopt", f"ec_paramgen_curve:{kind}"]))
    with pytest.raises(ConfigurationError, match="--tls-cert: the key must be RSA, or ECDSA on P-256 or P-384"):
        load(files(tmp_path, pair))


@pytest.mark.parametrize("kind", [("rsa:2048",), ("ec", "-pkeyopt", "ec_paramgen_curve:P-384")])
async def test_other_usual_keys_work(tmp_path: Path, kind: tuple[str, ...]) -> None:
    """Whatever is not refused gets through a handshake."""
    pair = self_signed(*kind)
    async with port(files(tmp_path, pair)) as open_port:
        assert await open_port.answers(pair.chain)


def test_an_encrypted_key_is_refused_without_asking_for_its_password(tmp_path: Path) -> None:
    """gRPC could not use it, and OpenSSL would ask the terminal."""
    with pytest.raises(ConfigurationError, match="--tls-key: the key is encrypted"):
        load(files(tmp_path, Pair(SERVER.chain, encrypted(SERVER.key))))


def test_a_file_that_is_not_there_is_refused_by_flag(tmp_path: Path) -> None:
    """So is one that may not be read."""
    paths = files(tmp_path)
    paths.key.unlink()
    with pytest.raises(ConfigurationError, match=r"--tls-key .*: No such file"):
        load(paths)


def test_the_key_is_in_no_representation(tmp_path: Path) -> None:
    """Of a value that may end up in a log by mistake."""
    assert KEY_MARK not in repr(load(files(tmp_path)))


@pytest.mark.parametrize(
    ("not_after", "expiry"),
    [(day(2031, 5, 6), "2031-05-06T00:00:00+00:00"), (day(2050, 1, 1), "2050-01-01T00:00:00+00:00")],
)
def test_the_dates_are_those_of_the_certificate(tmp_path: Path, not_after, expiry: str) -> None:  # type: ignore[no-untyped-def]
    """Both encodings of a date: two digits of a year until 2049, four from then on."""
    certificates = load(files(tmp_path, OLD.server(day(2001, 1, 1), not_after)))
    assert certificates.expiry == expiry
    assert certificates.not_before_s == day(2001, 1, 1).timestamp()


def test_expiry_is_told_once_a_day(tmp_path: Path, log: CapturedLogs) -> None:
    """From two weeks before it, or a third of a short lifetime, on; past it, as an error; never while there is time."""
    day_s = 86400.0
    paths = files(tmp_path, OLD.server(day(2030, 1, 1), day(2031, 1, 1)))
    now_s = day(2030, 6, 1).timestamp()
    tls = Tls(paths, lambda: now_s)
    for hours in range(30 * 24):
        now_s = day(2031, 1, 1).timestamp() - 20 * day_s + hours * 3600
        tls.poll()
    assert len(log.of("certificate expires soon")) == 14
    assert len(log.of("certificate has expired")) == 10
    write(tmp_path, OLD.server(day(2031, 1, 1), day(2031, 1, 31)))
    tls.poll()  # the 11th: twenty days are left of thirty, which is more than ten
    now_s += 12 * day_s
    tls.poll()
    assert len(log.of("certificate expires soon")) == 15
    assert len(log.of("certificate has expired")) == 10


class Port:
    """A gRPC port with health behind it."""

    def __init__(self, number: int, tls: Tls) -> None:
        self.number = number
        self.tls = tls

    async def answers(self, authority: bytes, client: Pair | None = None) -> bool:
        """Whether a call on a connection of its own gets through."""
        credentials = grpc.ssl_channel_credentials(
            authority, None if client is None else client.key, None if client is None else client.chain
        )
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.secure_channel(f"127.0.0.1:{self.number}", credentials, options) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return True

    def handshake(self, most: ssl.TLSVersion) -> str | None:
        """The version that a client which knows no later one gets."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # that it is old is the point
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = most
        with (
            socket.create_connection(("127.0.0.1", self.number), timeout=HANG_S) as plain,
            context.wrap_socket(plain) as wrapped,
        ):
            return wrapped.version()


@asynccontextmanager
async def port(paths: TlsFiles) -> AsyncIterator[Port]:
    tls = Tls(paths)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    number = server.add_secure_port("127.0.0.1:0", tls.credentials())
    await server.start()
    try:
        yield Port(number, tls)
    finally:
        await server.stop(None)


async def test_client_certificates_are_asked_for_if_there_are_authorities(tmp_path: Path) -> None:
    """Without authorities anybody gets in; with them nobody without a certificate of theirs."""
    async with port(files(tmp_path)) as open_port:
        assert describe(open_port.tls) == "server"
        assert await open_port.answers(OLD.pem)
        assert not await open_port.answers(NEW.pem)
    async with port(files(tmp_path, client_ca=OLD.pem)) as mutual_port:
        assert describe(mutual_port.tls) == "mutual"
        assert await mutual_port.answers(OLD.pem, CLIENT)
        assert not await mutual_port.answers(OLD.pem)
        assert not await mutual_port.answers(OLD.pem, NEW.client("client.test"))


async def test_new_files_count_from_the_next_connection_on(tmp_path: Path, log: CapturedLogs) -> None:
    """Certificate, key and authorities change without a restart; what is no good changes nothing."""
    async with port(files(tmp_path, client_ca=OLD.pem)) as mutual_port:
        assert await mutual_port.answers(OLD.pem, CLIENT)
        write(tmp_path, Pair(NEW.server().chain, SERVER.key), NEW.pem)  # no pair
        mutual_port.tls.poll()
        assert await mutual_port.answers(OLD.pem, CLIENT)
        write(tmp_path, NEW.server(), NEW.pem)
        mutual_port.tls.poll()
        assert await mutual_port.answers(NEW.pem, NEW.client("client.test"))
        assert not await mutual_port.answers(NEW.pem, CLIENT)
        assert not await mutual_port.answers(OLD.pem, NEW.client("client.test"))
    assert len(log.of("certificates not reloaded")) == 1
    assert len(log.of("certificates reloaded")) == 1
    assert KEY_MARK not in log.text


def test_each_port_is_told_of_a_change_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC asks at each connection; where nothing is new it parses nothing. Each port has its own view."""
    fetchers = []
    monkeypatch.setattr("grpc.dynamic_ssl_server_credentials", lambda _, fetch, **__: fetchers.append(fetch))
    tls = Tls(files(tmp_path))
    tls.credentials()
    tls.credentials()
    assert [fetch() for fetch in fetchers] == [None, None]
    write(tmp_path, NEW.server())
    tls.poll()
    for fetch in fetchers:
        assert fetch() is not None
        assert fetch() is None


async def test_a_second_port_has_the_latest_certificates(tmp_path: Path) -> None:
    """Credentials made after a change begin with it: a port that is opened anew needs no other."""
    tls = Tls(files(tmp_path))
    tls.credentials()
    write(tmp_path, NEW.server())
    tls.poll()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    number = server.add_secure_port("127.0.0.1:0", tls.credentials())
    await server.start()
    assert await Port(number, tls).answers(NEW.pem)
    await server.stop(None)


async def test_nothing_older_than_tls_1_2_is_spoken(tmp_path: Path) -> None:
    """A client that knows 1.1 at most is refused; 1.2 and 1.3 are spoken."""
    async with port(files(tmp_path)) as open_port:
        assert await asyncio.to_thread(open_port.handshake, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        assert await asyncio.to_thread(open_port.handshake, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.to_thread(open_port.handshake, ssl.TLSVersion.TLSv1_1)
