"""Messages to bytes and back: the framing of the sockets between the front end and its processes.

A frame is a 4-byte little-endian length of what follows, one byte that names the message's type, and the message in
msgpack (fields by name, so that a field with a default can be added later). The type byte is the index in `_TYPES`:
append, never reorder. Both ends of the socket are ours, so a frame that does not decode is a bug or a corrupted
stream: `CodecError`, which ends the engine.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from scheduler.config import EngineConfig
from scheduler.errors import EmberlineError
from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideMessage,
)
from scheduler.messages import (
    Abort,
    Activate,
    EngineFailed,
    FromEngine,
    LoadProgress,
    Pause,
    Ready,
    Shutdown,
    StandingBy,
    StepOutputs,
    Submit,
    ToEngine,
    Unpause,
)

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Far above the largest legal message (a million-token prompt is about 5 MB)."""

_HEADER = struct.Struct("<IB")
_TYPES: tuple[type[Any], ...] = (
    EngineConfig,
    Submit,
    Abort,
    Shutdown,
    LoadProgress,
    Ready,
    StepOutputs,
    EngineFailed,
    Activate,
    StandingBy,
    Pause,
    Unpause,
    GuideCompilerConfig,
    CompileGuide,
    GuideCompilerReady,
    GuideCompiled,
    GuideCompilerFailed,
)
_TAG_OF = {message_type: tag for tag, message_type in enumerate(_TYPES)}
_DECODERS = tuple(msgspec.msgpack.Decoder(message_type) for message_type in _TYPES)
_encoder = msgspec.msgpack.Encoder()

Message = EngineConfig | ToEngine | FromEngine | GuideMessage


class CodecError(EmberlineError):
    """The bytes are no frame of ours."""


def encode(message: Message) -> bytes:
    """One whole frame.

    Raises:
        CodecError: the message is larger than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(message)
    length = 1 + len(body)
    if length > MAX_FRAME_BYTES:
        raise CodecError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(length, _TAG_OF[type(message)]) + body


class FrameDecoder:
    """Collects bytes as they arrive and gives back whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take `data`; return the messages it completes, in order.

        Raises:
            CodecError: the length or type byte is impossible, or the body does not fit its type.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(self._buffer, start)
            if not 1 <= length <= MAX_FRAME_BYTES or tag >= len(_DECODERS):
                raise CodecError(f"impossible frame header: length {length}, type {tag}")
            end = start + 4 + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
            try:
                messages.append(_DECODERS[tag].decode(body))
            except msgspec.MsgspecError as error:
                raise CodecError(f"a {_TYPES[tag].__name__} does not decode: {error}") from None
            start = end
        if start:
            del self._buffer[:start]
        return messages
