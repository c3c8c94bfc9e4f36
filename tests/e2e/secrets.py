"""What a server with all its doors closed is given: tokens, and the folder that holds them and its certificates.

The folder is laid out as Kubernetes mounts a secret: each file is a link by way of a link to a folder of one version,
and a new version comes by the swap of that one link.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc

from tests.certificates import Pair


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
