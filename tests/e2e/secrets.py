"""What a server with all its doors closed is given: certificates, tokens, and the folder that holds them.

The folder is laid out as Kubernetes mounts a secret: each file is a link by way of a link to a folder of one version,
and a new version comes by the swap of that one link.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True)
class Pair:
    """A certificate chain and its key, in PEM."""

    chain: bytes
    key: bytes

    @classmethod
    def of(cls, cert: trustme.LeafCert) -> Pair:
        return cls(b"".join(blob.bytes() for blob in cert.cert_chain_pems), cert.private_key_pem.bytes())


class Authority:
    """Signs certificates of servers on this machine, and of clients."""

    def __init__(self) -> None:
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.pem = self._ca.cert_pem.bytes()

    def server(self) -> Pair:
        return Pair.of(self._ca.issue_cert("localhost", "127.0.0.1"))

    def client(self, name: str) -> Pair:
        return Pair.of(self._ca.issue_cert(name))


class Mount:
    """The folder. `put` swaps all files at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir()

    def path(self, name: str) -> Path:
        return self._folder / name

    def put(self, **files: bytes) -> None:
        self._version += 1
        version = self._folder / f"..version-{self._version}"
        version.mkdir()
        for name, data in files.items():
            (version / name).write_bytes(data)
            if not self.path(name).is_symlink():
                self.path(name).symlink_to(Path("..data", name))
        swapped = self._folder / "..data.new"
        swapped.symlink_to(version.name)
        swapped.replace(self._folder / "..data")


def token_line(name: str, scopes: str, token: str) -> str:
    return f"{name} {scopes} {hashlib.sha256(token.encode()).hexdigest()}\n"


def credentials(authority: bytes, client: Pair | None = None, token: str | None = None) -> grpc.ChannelCredentials:
    """What a caller connects with; the token goes with each call."""
    channel = grpc.ssl_channel_credentials(
        authority, None if client is None else client.key, None if client is None else client.chain
    )
    if token is None:
        return channel
    return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(token))
