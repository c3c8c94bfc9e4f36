"""scheduler/codec.py: messages survive the socket, and nothing else does."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.codec import _TYPES, MAX_FRAME_BYTES, CodecError, FrameDecoder, Message, encode
from scheduler.config import EngineConfig
from scheduler.guide_messages import (
    CompileGuide,
    GuideCompiled,
    GuideCompilerConfig,
    GuideCompilerFailed,
    GuideCompilerReady,
    GuideKind,
    GuideOutcome,
    GuideSource,
)
from scheduler.messages import (
    Abort,
    Activate,
    EngineFailed,
    EngineStats,
    FailureKind,
    FinishReason,
    LoadProgress,
    Pause,
    Phase,
    PromptLogprobs,
    Ready,
    RequestFailure,
    SamplingParams,
    SequenceOutput,
    SequenceStart,
    Shutdown,
    StandingBy,
    StepOutputs,
    StoppingParams,
    Submit,
    TokenLogprobs,
    Unpause,
)

MESSAGES: list[Message] = [
    EngineConfig(model="some/dir", num_threads=2, device_index=1, standby=True),
    Submit(
        request_id=7,
        prompt_token_ids=tuple(range(5000)),
        sampling=SamplingParams(
            temperature=0.5, seed=2**64 - 1, logit_bias=((3, -1.5), (4, math.inf)), allowed_token_ids=(1, 2)
        ),
        stopping=StoppingParams(max_tokens=2**31 - 1, eos_token_ids=(2,), stop_token_ids=(5, 6)),
        sequences=(SequenceStart(0, (1, 2, 3)), SequenceStart(2)),
        priority=-100,
        cache_salt="salz",
        guide=b"\x78\x01\x00",
        alone_until=4,
    ),
    Abort((1, 2, 3), ((4, 1), (4, 2))),
    Shutdown(),
    Activate(),
    Activate(device_index=3),
    StandingBy(1234),
    Pause((1, 2)),
    Unpause((1, 2)),
    LoadProgress("weights", 1.25),
    Ready(1, "llama", 10, 20, "float32", "cpu", "cpu", 16, 100, 2048, 64, 512, 3.5, 0.002),
    StepOutputs(
        step_id=9,
        outputs=(
            SequenceOutput(7, 0, (11,), (TokenLogprobs(-0.5, 1, (11, 12), (-0.5, -2.0)),), None, 16),
            SequenceOutput(8, 0, (2,), None, FinishReason.EOS),
            SequenceOutput(9, 0, (), prompt_logprobs=PromptLogprobs(1, b"\x00\xff", b"\x01", b"", bytes(range(256)))),
        ),
        failures=(RequestFailure(9, FailureKind.NON_FINITE), RequestFailure(10, FailureKind.INTERNAL, "i-1")),
        stats=EngineStats(num_running=2, num_kv_blocks=100),
    ),
    EngineFailed("builtins.ValueError", "no", "Traceback …", Phase.EXECUTE, 3, "num_seqs=1", starting=False),
    GuideCompilerConfig("some/dir", None, 20, (2, 3), 2.0, 18.0),
    CompileGuide(1, GuideSource(GuideKind.CHOICE, options=("a", "\n\U0001f600"))),
    GuideCompilerReady(12, 1.5),
    GuideCompiled(1, GuideOutcome.COMPILED, b"\x78\x01\x00"),
    GuideCompiled(2, GuideOutcome.UNSUPPORTED, what="not"),
    GuideCompilerFailed("builtins.ImportError", "no", is_unsupported=True),
]


def test_every_type_of_message_is_among_those_tried() -> None:
    """A message that is added to the table is added here."""
    assert {type(message) for message in MESSAGES} == set(_TYPES)


@given(st.data())
def test_every_message_survives_any_cut_of_the_stream(data: st.DataObject) -> None:
    """However the bytes of several messages are cut into reads, the same messages come out in order."""
    messages = data.draw(st.lists(st.sampled_from(MESSAGES), max_size=4))
    stream = b"".join(encode(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder = FrameDecoder()
    received: list[Message] = []
    for start, end in itertools.pairwise([0, *cuts, len(stream)]):
        received += decoder.feed(stream[start:end])
    assert received == messages


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<IB", 0, 0),
        struct.pack("<IB", MAX_FRAME_BYTES + 1, 0),
        struct.pack("<IB", 5, 200) + b"abcd",
        struct.pack("<IB", 5, 1) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<IB", 2, 1) + b"\x80",
    ],
    ids=["empty frame", "oversized", "unknown type", "no msgpack", "fields missing"],
)
def test_bytes_that_are_no_frame_are_refused(garbage: bytes) -> None:
    """A header that cannot be ours, or a body that does not fit its type, raises CodecError instead of a guess."""
    with pytest.raises(CodecError):
        FrameDecoder().feed(garbage)
