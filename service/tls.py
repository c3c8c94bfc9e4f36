"""The certificates of the port: read, checked, and renewed without a restart.

What lives here: what `--tls-cert`, `--tls-key` and `--tls-client-ca` mean. What must not: who may call what
(`auth.py`), looking for changes (`reloading.py`). gRPC asks for the certificates in force at each new connection, from
threads of its own, before the handshake; the answer comes from memory. Connections that exist keep theirs.

    files ─(off the loop, on a change)─► Certificates ─(at a handshake)─► gRPC

gRPC speaks TLS 1.2 and 1.3; that is its own default, and a test holds it to it. With client authorities a caller
without a certificate of theirs does not get through the handshake.

A key is compared with its certificate by OpenSSL, which alone of what is at hand can: it reads the files itself, so
`reloading.py` sees to it that they are the same ones that were read here. The dates and the kind of key are read from
the certificate's DER form: RFC 5280, section 4.1.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import grpc

from scheduler import logs
from scheduler.errors import ConfigurationError
from service.reloading import Reloading, read_file

PEM_BYTES_MAX = 1024 * 1024
EXPIRES_SOON_S = 14 * 86400.0
EXPIRES_SOON_SHARE = 1 / 3
"""Of the whole lifetime: of certificates made for a day two weeks would be all of it."""
REMIND_INTERVAL_S = 86400.0

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_RSA = bytes.fromhex("2a864886f70d010101")
_ECDSA = bytes.fromhex("2a8648ce3d0201")
_CURVES = (bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2b81040022"))
"""P-256 and P-384. Of other keys gRPC's TLS library signs with some and verifies none: a server would serve nobody."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the certificates are."""

    cert: Path
    """The server's own first, then those that lead to its authority."""
    key: Path
    client_ca: Path | None
    """None: callers need no certificate."""

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class Certificates:
    """What was in the files, checked."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    not_before_s: float
    not_after_s: float
    """Since the epoch; of the chain's first to expire."""

    @property
    def expiry(self) -> str:
        return datetime.fromtimestamp(self.not_after_s, UTC).isoformat(timespec="seconds")

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC takes it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.client_ca)


def load(files: TlsFiles) -> Certificates:
    """Raises ConfigurationError, naming the flag whose file is no good. No part of a file is in its text."""
    chain, key = _read("--tls-cert", files.cert), _read("--tls-key", files.key)
    read = [_facts("--tls-cert", pem) for pem in _certificates("--tls-cert", chain)]
    if not read[0].has_usable_key:
        raise ConfigurationError("--tls-cert: the key must be RSA, or ECDSA on P-256 or P-384; gRPC can use no other")
    _check_pair(files)
    client_ca = None
    if files.client_ca is not None:
        client_ca = _read("--tls-client-ca", files.client_ca)
        for pem in _certificates("--tls-client-ca", client_ca):
            _facts("--tls-client-ca", pem)
    first = min(read, key=lambda facts: facts.not_after_s)
    return Certificates(chain, key, client_ca, first.not_before_s, first.not_after_s)


class Tls:
    """The certificates in force. `poll`, off the loop, keeps them so."""

    def __init__(self, files: TlsFiles, wall_clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigurationError if the files are no good."""
        self.is_mutual = files.client_ca is not None
        self._wall_clock = wall_clock
        self._reminded_s = -REMIND_INTERVAL_S
        self._certificates = Reloading(
            "certificates", files.paths, lambda: load(files), lambda value: {"not_after": value.expiry}
        )
        self._remind()

    def credentials(self) -> grpc.ServerCredentials:
        """For one port; each has its own, since each keeps what it has seen last."""
        seen = self._certificates.value

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """None: nothing new."""
            nonlocal seen
            latest = self._certificates.value
            if latest is seen:
                return None
            seen = latest
            return latest.configuration()

        return grpc.dynamic_ssl_server_credentials(
            seen.configuration(),
            fetch,  # type: ignore[arg-type] # the stub lacks None, which gRPC's documentation has
            require_client_authentication=self.is_mutual,
        )

    def poll(self) -> None:
        """Take in what has changed, and say so once a day when a renewal is overdue. May block on the files."""
        self._certificates.poll()
        self._remind()

    def _remind(self) -> None:
        now_s, certificates = self._wall_clock(), self._certificates.value
        left_s = certificates.not_after_s - now_s
        lifetime_s = certificates.not_after_s - certificates.not_before_s
        if left_s >= min(EXPIRES_SOON_S, lifetime_s * EXPIRES_SOON_SHARE):
            self._reminded_s = -REMIND_INTERVAL_S  # the next one that comes to it is told at once
            return
        if now_s - self._reminded_s < REMIND_INTERVAL_S:
            return
        self._reminded_s = now_s
        if left_s > 0:
            logs.get_logger().warning(
                "certificate expires soon", not_after=certificates.expiry, hours_left=round(left_s / 3600, 1)
            )
        else:
            logs.get_logger().error("certificate has expired", not_after=certificates.expiry)


def _read(flag: str, path: Path) -> bytes:
    try:
        data = read_file(path, PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from None
    if len(data) > PEM_BYTES_MAX:
        raise ConfigurationError(f"{flag} {path}: larger than {PEM_BYTES_MAX} bytes")
    return data


def _certificates(flag: str, data: bytes) -> list[bytes]:
    found = _CERTIFICATE.findall(data)
    if not found:
        raise ConfigurationError(f"{flag}: no PEM certificate is in that file")
    return found


def _check_pair(files: TlsFiles) -> None:
    def refuse_password() -> NoReturn:
        raise ConfigurationError("--tls-key: the key is encrypted; gRPC can use only one that is not")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key, password=refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError("--tls-key: the key does not belong to the certificate of --tls-cert") from None
        why = f" ({error.reason.replace('_', ' ').lower()})" if error.reason else ""
        raise ConfigurationError(
            f"--tls-cert and --tls-key are no certificate and its private key in PEM{why}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"--tls-cert and --tls-key: {error.strerror}") from None


# What is in a certificate


@dataclass(frozen=True, slots=True)
class _Facts:
    not_before_s: float
    not_after_s: float
    has_usable_key: bool


def _facts(flag: str, pem: bytes) -> _Facts:
    """Raises ConfigurationError if it is no certificate."""
    try:
        _, certificate, _ = _element(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")))
        _, to_be_signed, _ = _element(certificate)
        tag, _, rest = _element(to_be_signed)
        if tag == _VERSION:
            _, _, rest = _element(rest)  # the serial number
        _, _, rest = _element(rest)  # the signature's algorithm
        _, _, rest = _element(rest)  # the issuer
        _, validity, rest = _element(rest)
        _, _, rest = _element(rest)  # the subject
        _, public_key, _ = _element(rest)
        begin_tag, begin, end = _element(validity)
        end_tag, end, _ = _element(end)
        return _Facts(_time(begin_tag, begin), _time(end_tag, end), _is_usable(public_key))
    except (ValueError, IndexError):
        raise ConfigurationError(f"{flag}: a certificate in that file cannot be read") from None


def _is_usable(public_key: bytes) -> bool:
    _, algorithm, _ = _element(public_key)
    _, name, parameters = _element(algorithm)
    return name == _RSA or (name == _ECDSA and _element(parameters)[1] in _CURVES)


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the contents of the first element, and what follows it."""
    tag, length, start = data[0], data[1], 2
    if length >= 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("it ends too early")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, text: bytes) -> float:
    """Years of two digits are those of 1950 to 2049, as RFC 5280 has it."""
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("no time")
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits >= "5" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def describe(tls: Tls | None) -> str:
    """For the `serving` line."""
    return "off" if tls is None else "mutual" if tls.is_mutual else "server"
