"""Certificates for the tests of TLS: authorities, and what each has signed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate chain and its key, in PEM."""

    chain: bytes
    key: bytes

    @classmethod
    def of(cls, cert: trustme.LeafCert) -> Pair:
        return cls(b"".join(blob.bytes() for blob in cert.cert_chain_pems), cert.private_key_pem.bytes())


class Authority:
    """One of those whose certificates are trusted."""

    def __init__(self) -> None:
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.pem = self._ca.cert_pem.bytes()

    def server(self, not_before: datetime | None = None, not_after: datetime | None = None) -> Pair:
        return Pair.of(self._ca.issue_cert(*NAMES, not_before=not_before, not_after=not_after))

    def client(self, name: str, common_name: str | None = None) -> Pair:
        return Pair.of(self._ca.issue_cert(name, common_name=common_name))


def write(folder: Path, pair: Pair, client_ca: bytes | None = None) -> dict[str, Path]:
    """The files, by flag."""
    paths = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    paths["tls_cert"].write_bytes(pair.chain)
    paths["tls_key"].write_bytes(pair.key)
    if client_ca is not None:
        paths["tls_client_ca"] = folder / "client_ca.pem"
        paths["tls_client_ca"].write_bytes(client_ca)
    return paths


def day(year: int, month: int, number: int) -> datetime:
    return datetime(year, month, number, tzinfo=UTC)
