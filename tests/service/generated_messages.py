"""Messages of the protocol, made by hypothesis from their descriptors: valid on the wire, and otherwise anything."""

from __future__ import annotations

import os
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import settings
from hypothesis import strategies as st

CANARY = "Quetzalbramble"
"""In every string: whatever shows it has shown what a caller sent."""
FUZZ_EXAMPLES = int(os.environ.get("EMBERLINE_TEST_FUZZ_EXAMPLES", "0"))
"""Instead of each test's own number, for a longer search: 20000 take some minutes."""

_FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 1.0, 5e-324, 1e308, 1e-8, 0.5, 2.0, 100.0])
_UINT32 = st.integers(0, 2**32 - 1) | st.integers(0, 200) | st.sampled_from([999, 1000, 2**31 - 1])
_INT32 = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 20)
_INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20)
_TEXTS = st.builds(lambda head, tail: head + CANARY + tail, st.text(max_size=8), st.text(max_size=8))
_STRINGS = _TEXTS | st.sampled_from(["", "user", "tiny", "{}", '{"type": "object"}', "[ab]+", 'root ::= "a"', "\x00"])
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _STRINGS,
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
}
_SMALL = st.sampled_from([1, 1, 0, 2, 5])
_PLAUSIBLE: dict[int, st.SearchStrategy[Any]] = {
    **_SCALARS,
    FieldDescriptor.TYPE_DOUBLE: st.sampled_from([1.0, 0.5, 0.0, 1e-8]),
    FieldDescriptor.TYPE_STRING: _TEXTS | st.sampled_from(["user", "assistant", CANARY]),
    **dict.fromkeys((FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32), _SMALL),
}
"""Values that most fields take: a message of them may get as far as the engine."""


def num_examples(usual: int) -> settings:
    """The settings of a test that makes so many examples in a usual run."""
    return settings(max_examples=FUZZ_EXAMPLES or usual)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, is_plausible: bool | None = None) -> Message:
    """Some of the fields, each with a value of its type. Every other message is a plausible one: few fields, and values
    that most fields take.
    """
    message = GetMessageClass(descriptor)()
    plausible = draw(st.booleans()) if is_plausible is None else is_plausible
    scalars = _PLAUSIBLE if plausible else _SCALARS
    for field in descriptor.fields:
        if draw(st.integers(0, 7 if plausible else 1)):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (scalars[part.type] for part in field.message_type.fields)
            getattr(message, field.name).update(draw(st.dictionaries(key, value, max_size=4)))
        elif field.is_repeated and field.message_type is not None:
            parts = st.lists(messages(field.message_type, plausible), max_size=3)
            getattr(message, field.name).extend(draw(parts))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars[field.type], max_size=4)))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(messages(field.message_type, plausible)))
        else:
            setattr(message, field.name, draw(scalars[field.type]))
    if plausible and "input" in descriptor.oneofs_by_name and message.WhichOneof("input") is None:
        message.text = draw(_TEXTS)  # type: ignore[attr-defined] # without it nothing comes of the rest
    return message


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes changed, cut out, put in or repeated."""
    parts = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(parts)))
        end = draw(st.integers(begin, min(begin + 16, len(parts))))
        match draw(st.sampled_from(["replace", "cut", "repeat"])):
            case "replace":
                parts[begin:end] = draw(st.binary(max_size=16))
            case "cut":
                del parts[begin:end]
            case "repeat":
                parts[begin:begin] = parts[begin:end] * draw(st.integers(1, 64))
    return bytes(parts)
