"""Callers that no library lets one be: a reader that never reads, garbage, a flood of pings. On bare sockets.

Of RFC 9113 only what these need. Everything is bounded: connections, bytes, time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripts.benchmarks.emberline_client import loopback

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 4
FRAME_HEADER = struct.Struct(">BHBBI")  # length in 8 + 16 bits, type, flags, stream
CONNECT_LIMIT_S = 10.0
SEND_LIMIT_S = 5.0


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return FRAME_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload


def call_frames(address: str, path: str, message: bytes, stream_id: int) -> bytes:
    """A unary request; header fields are literal and not indexed."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{path}",
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers.items())
    body = struct.pack(">BI", 0, len(message)) + message
    return frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, body)


@asynccontextmanager
async def stalled_readers(
    address: str, path: str, message: bytes, num_calls: int
) -> AsyncIterator[asyncio.StreamWriter]:
    """Calls over one connection whose windows are zero while the block runs: the server may send headers, and no byte
    of any message.
    """
    reader, writer = await _connect(address)
    drain = asyncio.create_task(_answer(reader, writer))
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))
        for number in range(num_calls):
            writer.write(call_frames(address, path, message, 2 * number + 1))
        await _flush(writer)
        yield writer
    finally:
        drain.cancel()
        await _close(writer)


async def garbage(address: str, rng: random.Random, num_connections: int) -> None:
    """Bytes that are no HTTP/2, frames that are no calls, calls that are no messages."""
    for number in range(num_connections):
        noise = rng.randbytes(rng.randrange(1, 4096))
        match number % 4:
            case 0:
                data = noise
            case 1:
                data = PREFACE + noise
            case 2:
                data = PREFACE + frame(SETTINGS, 0, 0) + frame(rng.randrange(256), rng.randrange(256), 1, noise[:64])
            case _:
                path = "emberline.v1.InferenceService/Generate"
                data = PREFACE + frame(SETTINGS, 0, 0) + call_frames(address, path, noise, 1)
        with contextlib.suppress(OSError):
            reader, writer = await _connect(address)
            try:
                writer.write(data)
                await _flush(writer)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.05)
            finally:
                await _close(writer)


async def ping_flood(address: str, num_pings: int) -> None:
    """Pings as fast as they can be sent, until the server has had enough."""
    reader, writer = await _connect(address)
    drain = asyncio.create_task(_swallow(reader))
    try:
        with contextlib.suppress(OSError):
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            for _ in range(num_pings // 100):
                writer.write(frame(PING, 0, 0, b"emberlin") * 100)
                await _flush(writer)
    finally:
        drain.cancel()
        await _close(writer)


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = loopback(address).rpartition(":")
    return await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_LIMIT_S)


async def _flush(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(writer.drain(), SEND_LIMIT_S)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 1.0)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """SETTINGS and PING are acknowledged, or the server would take the connection for dead."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            high, low, kind, flags, _ = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
            payload = await reader.readexactly(high << 16 | low)
            if kind in (SETTINGS, PING) and not flags & ACK:
                writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))


async def _swallow(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(65536):
            pass


def _string(text: str) -> bytes:
    """An HPACK string, not Huffman-coded, shorter than 127 bytes."""
    octets = text.encode("ascii")
    assert len(octets) < 127
    return bytes([len(octets)]) + octets
