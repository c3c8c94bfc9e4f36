"""A gRPC caller of a few dozen lines on a bare socket: for readers that no library lets one be.

    with BareCaller(address, window_bytes=0) as caller:
        caller.call("emberline.v1.InferenceService/Generate", request)
        …
        caller.open_window()
        messages = caller.messages(GenerateResponse, timeout_s=60)

Only what a test needs of RFC 9113: one connection, SETTINGS and PING answered, header blocks never decoded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
SETTINGS_INITIAL_WINDOW_SIZE = 4
WINDOW_BYTES_MAX = 2**31 - 1
FRAME_HEADER = struct.Struct(">BHBBI")  # length in 8 + 16 bits, type, flags, stream


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return FRAME_HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream_id) + payload


def connect(address: str, timeout_s: float = 60.0) -> socket.socket:
    """A plain TCP connection."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


class BareCaller:
    """One connection. A thread reads all there is to read; what the server may send is up to the windows."""

    def __init__(self, address: str, *, window_bytes: int) -> None:
        """`window_bytes`: how much of each response the server may send before `open_window`."""
        self._address = address
        self._socket = connect(address)
        self._changed = threading.Condition()
        self._data: dict[int, bytearray] = {}
        self._ended: set[int] = set()
        self._is_over = False
        self._next_stream_id = 1
        settings = struct.pack(">HI", SETTINGS_INITIAL_WINDOW_SIZE, window_bytes)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self._socket.settimeout(None)
        self._reader = threading.Thread(target=self._read, name="bare caller", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._reader.join(10.0)

    def call(self, path: str, request: bytes | None, *, prefix: bytes | None = None) -> int:
        """Begin a call; returns its stream's id. `prefix` replaces gRPC's five bytes before the message; None as a
        request ends the call with its headers.
        """
        stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{path}",
            ":authority": self._address,
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers.items())
        if request is None:
            frames = frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)
        else:
            body = (struct.pack(">BI", 0, len(request)) if prefix is None else prefix) + request
            frames = frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, body)
        self._socket.sendall(frames)
        with self._changed:
            self._data.setdefault(stream_id, bytearray())
        return stream_id

    def num_bytes(self, stream_id: int) -> int:
        """Bytes of response messages that have come so far."""
        with self._changed:
            return len(self._data[stream_id])

    def open_window(self, stream_id: int) -> None:
        """Let the server send all it has."""
        increment = struct.pack(">I", WINDOW_BYTES_MAX // 2)
        self._socket.sendall(frame(WINDOW_UPDATE, 0, 0, increment) + frame(WINDOW_UPDATE, 0, stream_id, increment))

    def until_ended(self, stream_id: int, timeout_s: float = 120.0) -> None:
        """Wait for the stream's trailers, its reset, or the connection's end."""
        with self._changed:
            done = self._changed.wait_for(lambda: stream_id in self._ended or self._is_over, timeout_s)
        assert done, f"stream {stream_id} is open after {timeout_s} s"

    def messages(self, message_class: type[Message], stream_id: int) -> list[Any]:
        """The response messages that have come so far."""
        with self._changed:
            data = bytes(self._data[stream_id])
        found = []
        while data:
            _, length = struct.unpack_from(">BI", data)
            found.append(message_class.FromString(data[5 : 5 + length]))
            data = data[5 + length :]
        return found

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while len(head := stream.read(FRAME_HEADER.size)) == FRAME_HEADER.size:
                high, low, kind, flags, stream_id = FRAME_HEADER.unpack(head)
                payload = stream.read(high << 16 | low)
                if kind in (SETTINGS, PING) and not flags & ACK:
                    self._socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
                with self._changed:
                    if kind == DATA:
                        self._data.setdefault(stream_id, bytearray()).extend(payload)
                    if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                        self._ended.add(stream_id)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def _string(text: str) -> bytes:
    """An HPACK string, not Huffman-coded, shorter than 127 bytes; bytes that are no UTF-8 come as surrogates."""
    octets = text.encode("utf-8", "surrogateescape")
    assert len(octets) < 127
    return bytes([len(octets)]) + octets
