"""Known killers of such servers, each of them a real report about some server: ours gives the right answer, its engine
lives on, and four neighbours, who stream meanwhile, get the tokens they get when they are alone.

What fits the shared server is tried on it, with the default model. The rest has servers of its own with a tiny model:
a pool too small for its callers, too few descriptors, a wall clock that steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.e2e import tiny_model
from tests.e2e.clock import Clock
from tests.e2e.harness import INFERENCE, SERVE, Generation, ReflectionClient, Server, Status
from tests.e2e.http2 import DATA, HEADERS, PREFACE, BareCaller, connect, frame

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INT32_MAX, UINT32_MAX, UINT64_MAX = 2**31 - 1, 2**32 - 1, 2**64 - 1
SETTLE_TIMEOUT_S = 120.0
"""A bound against hanging."""
NEAR_TIE = 1e-3
"""Where the two best logits differ by less, the shape of a batch may decide between them (as the design defines it)."""
PROMPTS = ("The capital of France is", "Water boils at", "The first ten prime numbers are", "def fibonacci(n):\n")
NUM_ALONE = 48
CANARY = "Quetzalbramble"


def greedy(text: str, max_tokens: int, **output: Any) -> dict[str, Any]:
    return {
        "text": text,
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": max_tokens, "ignore_eos": True},
        "output": {"token_ids": True, **output},
    }


class House:
    """A server and its four neighbours, each heard alone first."""

    def __init__(self, server: Server, client: ReflectionClient) -> None:
        self.server = server
        self.client = client
        self.info = client.call("InfoService/GetModelInfo")
        self.alone: list[list[int]] = []
        for prompt in PROMPTS:
            generation = client.generate(**greedy(prompt, NUM_ALONE, logprobs=2)).expect_ok()
            margins = [token.top[0].logprob - token.top[1].logprob for token in generation.tokens]
            assert min(margins) > NEAR_TIE, f"{prompt!r} makes no neighbour: it comes to a near-tie"
            self.alone.append(generation.token_ids)

    @contextlib.contextmanager
    def neighbours(self, num_tokens: int = 10, *, forever: bool = True) -> Iterator[None]:
        """Four streams of `num_tokens`, again and again until the block is over (once, if not `forever`), that must not
        notice anything; nor must the engine.
        """
        engine_pid = self.server.engine_pid()
        num_logs = len(self.server.logs)
        over = threading.Event()
        begun = [threading.Event() for _ in PROMPTS]

        def live(number: int) -> None:
            try:
                for _ in itertools.count():
                    request = greedy(PROMPTS[number], num_tokens)
                    generation = self.client.generate(**request, on_response=lambda _: begun[number].set())
                    assert generation.expect_ok().token_ids == self.alone[number][:num_tokens]
                    if over.is_set() or not forever:
                        break
            finally:
                begun[number].set()

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            lives = [pool.submit(live, number) for number in range(len(PROMPTS))]
            try:
                for event in begun:
                    assert event.wait(SETTLE_TIMEOUT_S)
                yield
            finally:
                over.set()
            for outcome in lives:
                outcome.result(SETTLE_TIMEOUT_S)
        assert self.server.engine_pid() == engine_pid
        assert self.server.fatal_errors == []
        assert [r for r in self.server.logs[num_logs:] if r["level"] in ("error", "critical")] == []
        assert self.client.health.check("readiness") == "SERVING"

    def ask(self, **fields: Any) -> Generation:
        return self.client.generate(**fields)

    def ask_raw(self, request: bytes, path: str = f"{INFERENCE}/Generate") -> Status:
        """Bytes for a request: how the call ends."""
        kind = self.client.channel.unary_stream if path.endswith("/Generate") else self.client.channel.unary_unary
        call = kind(f"/{path}")
        try:
            done = call(request, timeout=SETTLE_TIMEOUT_S)
            for _ in done if path.endswith("/Generate") else ():
                pass
        except grpc.RpcError as error:
            return Status.of(error)
        return Status(grpc.StatusCode.OK)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (load := self.client.load()).running or load.waiting or load.kv_blocks_used or load.waiting_tokens:
            assert time.monotonic() < deadline, f"still held: {load}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def house(server: Server, client: ReflectionClient) -> House:
    """The shared server with the default model."""
    return House(server, client)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.contextmanager
def tiny_house(model: Path, **options: Any) -> Iterator[House]:
    flags = {"threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kv_blocks": 512} | options
    with Server(model=model, **flags) as server, ReflectionClient(server.address) as client:
        yield House(server, client)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.005)


async def _leave_loop_empty() -> None:
    """grpc.aio shares one queue of events among all loops: what comes for a closed one is logged as an error."""
    await asyncio.sleep(0.5)


def short(**changes: Any) -> dict[str, Any]:
    """A small greedy request with some fields changed; parts are merged."""
    request = greedy("Once upon a time", 4)
    for name, value in changes.items():
        if name in ("token_ids", "chat"):
            del request["text"]
        request[name] = {**request.get(name, {}), **value} if isinstance(value, Mapping) else value
    return request


# -------------------------------------------------------------------------------------------------- prompts and lengths

EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text", {"text": ""}),
    "token_ids": ("token_ids.ids", {"token_ids": {"ids": []}}),
    "chat": ("chat.messages", {"chat": {"messages": []}}),
    "nothing": ("input", {}),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_prompt(house: House, kind: str) -> None:
    """An empty prompt, in each form, is INVALID_ARGUMENT for its field."""
    field, request = EMPTY[kind]
    with house.neighbours():
        assert set(house.ask(**request).expect(INVALID).status.field_violations) == {field}


def test_a_prompt_one_token_over_the_limit(house: House) -> None:
    """One token too many, as ids, as text or with resumed tokens, is INVALID_ARGUMENT, with the bound."""
    most = house.info.limits.max_prompt_tokens
    too_long = {
        "token_ids.ids": {"token_ids": {"ids": [1000] * (most + 1)}},
        "text": {"text": " word" * (most + 1)},
        # One more would be the whole context: that is an end, and served as one.
        "resume_token_ids": {"token_ids": {"ids": [1000] * (most - 3)}, "resume_token_ids": [5] * 5},
    }
    with house.neighbours():
        for field, request in too_long.items():
            violations = house.ask(**request).expect(INVALID).status.field_violations
            assert set(violations) == {field}
            assert re.search(r"at most \d+", violations[field])


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**31), INT32_MAX])
def test_max_tokens_out_of_bounds(house: House, max_tokens: int) -> None:
    """max_tokens 0, negative and 2³¹−1 are INVALID_ARGUMENT with the bounds."""
    with house.neighbours():
        status = house.ask(**short(stopping={"max_tokens": max_tokens})).expect(INVALID).status
    bounds = f"must be in [1, {house.info.limits.max_output_tokens}]"
    assert status.field_violations["stopping.max_tokens"] == bounds


# ------------------------------------------------------------------------------------------------------------ token ids


def varint(value: int) -> bytes:
    """A number as protobuf writes it; a negative one as its 64-bit complement."""
    value &= UINT64_MAX
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def nested(house: House, path: str, payload: bytes) -> bytes:
    """`payload` as the length-delimited field at `path`, by the numbers that reflection tells."""
    descriptor = house.client.message("GenerateRequest").DESCRIPTOR
    numbers = []
    for name in path.split("."):
        found = descriptor.fields_by_name[name]
        numbers.append(found.number)
        descriptor = found.message_type
    for number in reversed(numbers):
        payload = varint(number << 3 | 2) + varint(len(payload)) + payload
    return payload


BAD_IDS = {"-1": -1, "V": tiny_model.VOCAB_SIZE, "2^31-1": INT32_MAX, "2^32-1": UINT32_MAX, "-2^63": -(2**63) - 1}


@pytest.mark.parametrize("name", BAD_IDS)
def test_token_ids_that_are_none(house: House, name: str) -> None:
    """Token ids −1 (which only raw bytes can say), V, 2³¹−1 and beyond are INVALID_ARGUMENT wherever ids may stand."""
    bad = varint(BAD_IDS[name])
    places = {
        "token_ids.ids": ("token_ids.ids", bad),
        "resume_token_ids": ("resume_token_ids", bad),
        "stopping.stop_token_ids": ("stopping.stop_token_ids", bad),
        "sampling.allowed_token_ids": ("sampling.allowed_token_ids", bad),
        "sampling.logit_bias": ("sampling.logit_bias", b"\x08" + bad + b"\x11" + bytes(8)),
    }
    with house.neighbours():
        for field, (path, payload) in places.items():
            request = short(token_ids={"ids": [7]}) if field == "token_ids.ids" else short()
            plain = house.client.request(f"{INFERENCE}/Generate", **request).SerializeToString()
            status = house.ask_raw(plain + nested(house, path, payload))
            assert status.code is INVALID, (field, status)
            assert all(violated.startswith(field) for violated in status.field_violations), status


# -------------------------------------------------------------------------------------------------------------- numbers

FLOATS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (math.ulp(0.0), 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logit_bias": (-100, 100),
}
"""Fields and their bounds, as the protocol's comments give them."""
VALUES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "-0.0": -0.0, "5e-324": 5e-324, "1e308": 1e308}


@pytest.mark.parametrize("name", VALUES)
def test_strange_floats(house: House, name: str) -> None:
    """NaN, ±Inf, −0.0, 5e-324 and 1e308, in each float of the protocol: within the field's bounds it is served, greedy
    as ever, otherwise INVALID_ARGUMENT for that field.
    """
    value = VALUES[name]
    cases = [(field, None if field == "temperature" else temperature) for field in FLOATS for temperature in (0.0, 0.7)]

    def ask(case: tuple[str, float | None]) -> Generation:
        field, temperature = case
        sampling = {field: _json({"7": value} if field == "logit_bias" else value)}
        if temperature is not None:
            sampling["temperature"] = temperature
        return house.ask(**short(sampling=sampling, output={"logprobs": 1}))

    plain = house.ask(**short()).expect_ok()
    with house.neighbours(), ThreadPoolExecutor(len(cases)) as pool:
        generations = list(pool.map(ask, cases))
    for (field, temperature), generation in zip(cases, generations, strict=True):
        least, most = FLOATS[field]
        if least <= value <= most:
            generation.expect_ok()
            if temperature != 0.7:
                assert generation.token_ids == plain.token_ids, f"{field} {name} should change nothing"
        else:
            (violated,) = generation.expect(INVALID).status.field_violations
            assert violated.startswith(f"sampling.{field}")


def _json(value: Any) -> Any:
    """As protojson writes it."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return names.get(str(value), value)


def test_temperature_next_to_nothing(house: House) -> None:
    """Temperature 1e-8, by which no logit survives a division in float32, is greedy."""
    with house.neighbours():
        for temperature in (1e-8, 9.9e-6, 1e-300):
            request = greedy(PROMPTS[0], 8)
            request["sampling"] = {"temperature": temperature}
            assert house.ask(**request).expect_ok().token_ids == house.alone[0][:8]
        nearly = house.ask(**short(sampling={"temperature": 1.1e-5}))  # just above: sampled, and finite
        nearly.expect_ok()


def test_the_largest_seed(house: House) -> None:
    """Seed 2⁶⁴−1 is a seed like any other: told, and the same tokens again."""
    request = short(sampling={"seed": str(UINT64_MAX), "temperature": 1.5})
    with house.neighbours():
        twice = [house.ask(**request).expect_ok() for _ in range(2)]
    assert [generation.prompt.seed for generation in twice] == [UINT64_MAX] * 2
    assert twice[0].token_ids == twice[1].token_ids


HUGE: dict[str, tuple[grpc.StatusCode, dict[str, Any]]] = {
    "n": (INVALID, {"sampling": {"n": 10**6}}),
    "n -1": (INVALID, {"sampling": {"n": -1}}),
    "logprobs": (INVALID, {"output": {"logprobs": 10**6}}),
    "prompt_logprobs": (INVALID, {"output": {"prompt_logprobs": 10**6}}),
    "min_tokens": (INVALID, {"stopping": {"min_tokens": INT32_MAX}}),
    "stream_interval": (INVALID, {"output": {"stream_interval": 10**6}}),
    "priority": (INVALID, {"priority": INT32_MAX}),
    "top_k": (grpc.StatusCode.OK, {"sampling": {"top_k": INT32_MAX, "temperature": 1}}),
    "stop_strings": (INVALID, {"stopping": {"stop_strings": ["x"] * 10**5}}),
    "allowed_token_ids": (INVALID, {"sampling": {"allowed_token_ids": [7] * 10**5}}),
    "max_queue_time": (INVALID, {"max_queue_time": "-1s"}),
    "max_time": (grpc.StatusCode.OK, {"max_time": "315576000000s", "max_queue_time": "315576000000s"}),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_counts(house: House, name: str) -> None:
    """n or logprobs of 10⁶, and other counts far beyond all bounds, cost nothing: they are refused at the edge, or mean
    no more than the vocabulary does.
    """
    code, changes = HUGE[name]
    with house.neighbours():
        house.ask(**short(**changes)).expect(code)


BIASES = {"out of vocabulary": "49152", "far out": str(UINT32_MAX)}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_out_of_the_vocabulary(house: House, name: str) -> None:
    """A logit_bias on an id that is none is INVALID_ARGUMENT, however good the rest of the map is."""
    bias = {"7": 1.0, BIASES[name]: 1.0}
    with house.neighbours():
        (violated,) = house.ask(**short(sampling={"logit_bias": bias})).expect(INVALID).status.field_violations
    assert violated == f"sampling.logit_bias[{BIASES[name]}]"


@pytest.mark.parametrize("value", [100.0, -100.0, 0.0])
def test_a_bias_on_the_whole_vocabulary(house: House, value: float) -> None:
    """A logit_bias on every token is valid, and the same on all of them changes nothing."""
    bias = {str(token_id): value for token_id in range(house.info.vocab_size)}
    request = greedy(PROMPTS[2], 6)
    request["sampling"]["logit_bias"] = bias
    with house.neighbours():
        assert house.ask(**request).expect_ok().token_ids == house.alone[2][:6]


def test_everything_allowed_and_everything_but_one_forbidden(house: House) -> None:
    """allowed_token_ids of the whole vocabulary changes nothing; with a single id there is no other token, even against
    the strongest bias; controls that leave no token fail that request alone.
    """
    vocabulary = list(range(house.info.vocab_size))
    request = greedy(PROMPTS[1], 6)
    with house.neighbours():
        request["sampling"] = {"temperature": 0, "allowed_token_ids": vocabulary}
        assert house.ask(**request).expect_ok().token_ids == house.alone[1][:6]
        request["sampling"] = {"temperature": 2, "allowed_token_ids": [9], "logit_bias": {"9": -100, "10": 100}}
        assert house.ask(**request).expect_ok().token_ids == [9] * 6
        none_left = short(
            sampling={"allowed_token_ids": [2]}, stopping={"min_tokens": 2, "max_tokens": 4, "ignore_eos": False}
        )
        house.ask(**none_left).expect(INVALID)


@pytest.mark.parametrize("sign", [1, -1])
def test_all_penalties_at_their_limits(house: House, sign: int) -> None:
    """All penalties at their limits together, greedy and at every temperature, serve finite logprobs."""
    penalties = {
        "presence_penalty": 2.0 * sign,
        "frequency_penalty": 2.0 * sign,
        "repetition_penalty": 100.0 if sign > 0 else 0.01,
    }
    with house.neighbours():
        requests = [
            short(
                sampling={**penalties, "temperature": temperature, "min_p": 1.0, "top_k": 3},
                stopping={"max_tokens": 12},
                output={"logprobs": 20},
            )
            for temperature in (0, 2e-5, 1, 100)
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            generations = list(pool.map(lambda request: house.ask(**request), requests))
        for generation in generations:
            assert len(generation.expect_ok().token_ids) == 12
            assert all(math.isfinite(token.logprob) for token in generation.tokens)


GUIDES: dict[str, dict[str, Any]] = {
    "malformed grammar": {"grammar": 'root ::= "a" | ( root'},
    "endless grammar": {"grammar": "root ::= root root root"},
    "malformed regex": {"regex": "(((("},
    "explosive regex": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "malformed schema": {"json_schema": "{"},
    "recursive schema": {"json_schema": '{"$ref": "#"}'},
    "long choice": {"choice": {"options": ["x" * 1000] * 1000}},
}


def guided(guide: dict[str, Any]) -> dict[str, Any]:
    return {**short(guided=guide), "stopping": {"max_tokens": 4}}


@pytest.mark.parametrize("name", GUIDES)
def test_malformed_and_explosive_guides(house: House, name: str) -> None:
    """Each is the caller's mistake, found within limits of time, memory and size, and nobody else's business."""
    with house.neighbours():
        house.ask(**guided(GUIDES[name])).expect(INVALID)


# ----------------------------------------------------------------------------------------------------------- identities


def test_duplicate_request_ids(house: House) -> None:
    """Of forty calls at once under one request_id one is served and the rest are ALREADY_EXISTS; after its end the id
    is free again.
    """
    request = short(request_id="the one", stopping={"max_tokens": 12})
    with house.neighbours():
        for _ in range(2):
            with ThreadPoolExecutor(40) as pool:
                told = list(pool.map(lambda _: house.ask(**request), range(40)))
            codes = [generation.code for generation in told]
            # A call that comes after the first one's end is served, too: on a slow machine there may be one.
            assert codes.count(grpc.StatusCode.OK) >= 1
            assert codes.count(grpc.StatusCode.ALREADY_EXISTS) >= 30
            assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.ALREADY_EXISTS}
            served = [generation.token_ids for generation in told if generation.code is grpc.StatusCode.OK]
            assert len(set(map(tuple, served))) == 1


# -------------------------------------------------------------------------------------------------------------- cancels


def test_cancel_at_the_very_last_token(house: House) -> None:
    """A stream cancelled in the moment in which its last token comes, or the one before: nothing is left behind."""
    with house.neighbours():
        for number in range(16):
            num_tokens = 1 + number % 4
            call = house.client.stream(**greedy(f"Take {number}", num_tokens))
            for count, _ in enumerate(call, 1):
                if count >= num_tokens - number % 2:
                    call.cancel()
                    break
            assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
    house.wait_until_idle()


def test_cancel_during_prefill(house: House) -> None:
    """Long prompts whose callers leave while they are being computed."""
    long = [random.Random(number).choices(range(1000, 20_000), k=1500) for number in range(3)]
    with house.neighbours():
        for ids in long:
            _until(lambda: house.client.load().kv_blocks_used < 24)
            call = house.client.stream(**short(token_ids={"ids": ids}, stopping={"max_tokens": 2000}))
            # 1,500 tokens are three steps or more: as soon as it holds blocks, it is in the midst of them.
            _until(lambda: house.client.load().kv_blocks_used >= 30)
            call.cancel()
            with pytest.raises(grpc.RpcError):
                next(call)
    house.wait_until_idle()


def test_two_thousand_cancels_at_once(house: House) -> None:
    """2,000 streams, open in the front end, cancelled within the same few milliseconds: nothing is left behind and the
    next caller is served.
    """

    async def flood() -> float:
        request = house.client.request(f"{INFERENCE}/Generate", **greedy("Now", 64))
        async with house.client.aio_channel() as channel:
            stub = house.client.stub(f"{INFERENCE}/Generate", channel)
            calls = [stub(request, timeout=SETTLE_TIMEOUT_S) for _ in range(2000)]
            deadline = time.monotonic() + SETTLE_TIMEOUT_S
            while (await asyncio.to_thread(house.client.load)).waiting < 500:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            begun_s = time.monotonic()
            for call in calls:
                call.cancel()
            took_s = time.monotonic() - begun_s
            codes = await asyncio.gather(*(call.code() for call in calls))
        assert set(codes) <= {grpc.StatusCode.CANCELLED, EXHAUSTED}
        await _leave_loop_empty()
        return took_s

    with house.neighbours(NUM_ALONE, forever=False):
        print(f"2,000 cancels in {asyncio.run(flood()) * 1000:.0f} ms")
    house.wait_until_idle()
    house.ask(**short()).expect_ok()


# --------------------------------------------------------------------------------------------------------- slow readers


def test_a_reader_with_a_zero_window(house: House) -> None:
    """Readers that give the server no window hold up nobody; when one opens its window, all of its tokens are there;
    the rest may vanish.
    """
    request = house.client.request(f"{INFERENCE}/Generate", **greedy(PROMPTS[0], 24)).SerializeToString()
    endless = house.client.request(f"{INFERENCE}/Generate", **greedy(PROMPTS[1], 1500)).SerializeToString()
    with contextlib.ExitStack() as stack:
        with house.neighbours():
            callers = [stack.enter_context(BareCaller(house.server.address, window_bytes=0)) for _ in range(3)]
            patient = callers[0].call(f"{INFERENCE}/Generate", request)
            others = [caller.call(f"{INFERENCE}/Generate", endless) for caller in callers[1:]]
            deadline = time.monotonic() + SETTLE_TIMEOUT_S
            while house.client.load().running < 2:
                assert time.monotonic() < deadline
        with house.neighbours(20, forever=False):
            for caller, stream_id in zip(callers, (patient, *others), strict=True):
                assert caller.num_bytes(stream_id) == 0
        callers[0].open_window(patient)
        callers[0].until_ended(patient)
        responses = callers[0].messages(house.client.message("GenerateResponse"), patient)
        assert [token.id for response in responses for token in response.tokens] == house.alone[0][:24]
    house.wait_until_idle()


# --------------------------------------------------------------------------------------------------------------- floods


def test_five_thousand_requests_at_once(house: House) -> None:
    """Of 5,000 requests at once each is served or told QUEUE_FULL with a pushback; the server's memory stays bounded,
    and those who ran before do not notice.
    """
    before_bytes = house.server.memory_bytes()
    peak_bytes = 0

    async def flood() -> list[Generation]:
        async with house.client.aio_channel() as channel:
            request = short(token_ids={"ids": [1000]}, stopping={"max_tokens": 1})
            calls = [asyncio.create_task(house.client.agenerate(channel, **request)) for _ in range(5000)]
            measuring = asyncio.create_task(measure())
            told = await asyncio.gather(*calls)
            measuring.cancel()
        await _leave_loop_empty()
        return told

    async def measure() -> None:
        nonlocal peak_bytes
        while True:
            peak_bytes = max(peak_bytes, await asyncio.to_thread(house.server.memory_bytes))
            await asyncio.sleep(0.05)

    with house.neighbours(NUM_ALONE, forever=False):
        told = asyncio.run(flood())
    served = [generation for generation in told if generation.code is grpc.StatusCode.OK]
    refused = [generation for generation in told if generation.code is not grpc.StatusCode.OK]
    print(f"{len(served)} served, {len(refused)} refused; memory +{(peak_bytes - before_bytes) >> 20} MiB")
    for generation in refused:
        generation.expect(EXHAUSTED, "QUEUE_FULL")
        assert generation.status.pushback_ms is not None
        assert generation.status.pushback_ms > 0
        assert generation.status.retry_delay_s == pytest.approx(generation.status.pushback_ms / 1000)
    assert len(served) >= 1000
    assert len({tuple(generation.token_ids) for generation in served}) == 1
    assert peak_bytes - before_bytes < 1 << 30
    house.wait_until_idle()


METHODS = (
    f"{INFERENCE}/Generate",
    f"{INFERENCE}/Complete",
    "emberline.v1.TokenizerService/Tokenize",
    "emberline.v1.TokenizerService/Detokenize",
    "emberline.v1.InfoService/GetModelInfo",
    "grpc.health.v1.Health/Check",
)


def test_a_thousand_garbage_messages(house: House) -> None:
    """1,000 messages that are none, to every method, are INVALID_ARGUMENT each, and the log does not grow with them."""
    noise = random.Random(1000)
    num_logs = len(house.server.logs)
    # They begin with a field that cannot be, so that none of them is a message by accident.
    first = [b"\x00", b"\x07", b"\x0c", b"\x0e", b"\x0f", b"\xff" * 11]
    garbage = [noise.choice(first) + noise.randbytes(noise.randrange(200)) for _ in range(1000)]
    with house.neighbours(), ThreadPoolExecutor(16) as pool:
        told = list(pool.map(house.ask_raw, garbage, itertools.cycle(METHODS)))
    assert {status.code for status in told} == {INVALID}
    # The neighbours' own lines are not meant.
    lines = [record for record in house.server.logs[num_logs:] if record["event"] != "request finished"]
    assert len(lines) <= 8, lines
    assert "Traceback" not in house.server.raw_stderr


def test_strings_that_are_no_text(house: House) -> None:
    """Bytes that are not UTF-8, in each string of the request, are INVALID_ARGUMENT, without a traceback in the log or
    a word of them in the status.
    """
    broken = CANARY.encode() + b"\xff\xfe\xed\xa0\x80"
    plain = house.client.request(f"{INFERENCE}/Generate", **short()).SerializeToString()
    with house.neighbours():
        for path in ("text", "request_id", "model", "stopping.stop_strings", "cache.salt", "guided.grammar"):
            status = house.ask_raw(plain + nested(house, path, broken))
            assert status.code is INVALID, path
            assert CANARY not in repr(status)
        house.ask(**short(text="\x00\u202e\ufeff\U0010ffff")).expect_ok()  # strange, but text
    assert "Traceback" not in house.server.raw_stderr
    assert CANARY not in house.server.raw_stderr


def test_an_oversized_message(house: House) -> None:
    """A message over max_request_bytes is RESOURCE_EXHAUSTED; one just under it is read, and refused for its length."""
    most = house.info.limits.max_request_bytes
    with house.neighbours():
        assert house.ask(text="a" * (most + 1)).code is EXHAUSTED
        status = house.ask(text=" a" * ((most - 1000) // 2)).expect(INVALID).status
    assert set(status.field_violations) == {"text"}
    assert status.details_bytes <= 1024


def test_calls_without_a_message(house: House) -> None:
    """Headers alone, and the end: every method answers, though the caller set no deadline."""
    paths = [f"{INFERENCE}/Generate", f"{INFERENCE}/Complete", "emberline.v1.TokenizerService/Tokenize"]
    paths += ["emberline.v1.InfoService/GetLoad", "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"]
    with house.neighbours(), BareCaller(house.server.address, window_bytes=65535) as caller:
        for stream_id in [caller.call(path, None) for path in paths]:
            caller.until_ended(stream_id, 20.0)
            assert caller.num_bytes(stream_id) == 0
    house.wait_until_idle()


def test_connections_that_speak_something_else(house: House) -> None:
    """HTTP/1.1, TLS, noise, broken frames and gRPC messages of impossible lengths end their own connection only."""
    noise = random.Random(5)
    request = b"GET / HTTP/1.1\r\nHost: emberline\r\n\r\n"
    hello = bytes.fromhex("1603010200010001fc0303") + noise.randbytes(300)
    speeches = [
        request,
        hello,
        noise.randbytes(4096),
        PREFACE + noise.randbytes(4096),
        PREFACE + frame(DATA, 0, 1, b"no headers came before"),
        PREFACE + frame(HEADERS, 4, 1, noise.randbytes(100)),
        PREFACE + frame(4, 0, 0) + frame(9, 0, 1, b"\x00" * 10_000),
        PREFACE,
        b"",
    ]
    refused = [b"\x00\xff\xff\xff\xff", b"\x01\x00\x00\x00\x01", b"\x07\x00\x00\x00\x01"]
    broken_off = [b"\x00\x00", b"\x00\x00\x00\x00\x09"]
    with house.neighbours():
        for speech in speeches:
            with contextlib.suppress(OSError), connect(house.server.address) as line:
                line.sendall(speech)
                line.shutdown(socket.SHUT_WR)
                line.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    while line.recv(65536):
                        pass
        for prefix in refused + broken_off:
            with BareCaller(house.server.address, window_bytes=65535) as caller:
                stream_id = caller.call(f"{INFERENCE}/Generate", b"x", prefix=prefix)
                caller.until_ended(stream_id, 20.0)
                assert caller.num_bytes(stream_id) == 0
    house.wait_until_idle()


@pytest.mark.parametrize("path", ["\udcff", f"{INFERENCE}/\udcff\udcfe"])
def test_a_path_that_is_no_utf8(house: House, path: str) -> None:
    """A method whose name is no UTF-8 ends its own call: who streams goes on, and whoever waits for a connection is
    served. (grpcio 1.84 and 1.85 close the port over it; it is opened anew.)
    """
    with house.neighbours(NUM_ALONE, forever=False):
        with BareCaller(house.server.address, window_bytes=65535) as caller:
            caller.until_ended(caller.call(path, b""))
        for _ in range(5):
            with grpc.insecure_channel(house.server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                stub = house.client.stub("InferenceService/Complete", channel)
                request = house.client.request("InferenceService/Complete", **short())
                assert stub(request, timeout=SETTLE_TIMEOUT_S, wait_for_ready=True).completions
    house.wait_until_idle()


# ------------------------------------------------------------------------------------- a pool too small for its callers


@pytest.fixture(scope="module")
def cramped(tiny: Path) -> Iterator[House]:
    """A pool of six blocks: three requests of two blocks each."""
    with tiny_house(tiny, num_kv_blocks=6, block_size=16) as house:
        assert house.info.limits.max_model_len == 96
        yield house


def test_a_prompt_larger_than_the_pool(cramped: House) -> None:
    """What can never fit is INVALID_ARGUMENT at once, though the model's context is longer; what just fits is served to
    the end of the pool.
    """
    with cramped.neighbours(4):
        for num_tokens in (96, 97, 500, tiny_model.CONTEXT):
            told = cramped.ask(token_ids={"ids": [1000] * num_tokens}).expect(INVALID).status
            assert set(told.field_violations) == {"token_ids.ids"}
            assert re.search("at most 9[56]", told.field_violations["token_ids.ids"])
        largest = cramped.ask(**short(token_ids={"ids": [1000] * 95}, stopping={"max_tokens": 50})).expect_ok()
    assert (largest.finish_reason, len(largest.token_ids)) == ("CONTEXT_LIMIT", 1)


def test_two_hundred_requests_in_a_pool_for_three(cramped: House) -> None:
    """200 requests over a pool that holds three are all served in the end, preempted or not, each with the tokens it
    has when alone.
    """
    num_tokens = 16
    before = cramped.client.load().preemptions_total

    async def crowd() -> list[Generation]:
        async with cramped.client.aio_channel() as channel:
            requests = [greedy(PROMPTS[number % 4], num_tokens) for number in range(200)]
            return await asyncio.gather(*(cramped.client.agenerate(channel, **request) for request in requests))

    with cramped.neighbours(num_tokens):
        generations = asyncio.run(crowd())
    for number, generation in enumerate(generations):
        assert generation.expect_ok().token_ids == cramped.alone[number % 4][:num_tokens]
    num_preemptions = cramped.client.load().preemptions_total - before
    print(f"{num_preemptions} preemptions")
    assert num_preemptions > 0
    cramped.wait_until_idle()


def test_cancel_during_preemption(cramped: House) -> None:
    """Streams that leave while they wait for the blocks that were taken from them leave nothing behind."""

    async def crowd(channel: grpc.aio.Channel) -> int:
        """Some callers; those that have had tokens leave as soon as one of them is preempted."""
        before = (await asyncio.to_thread(cramped.client.load)).preemptions_total
        begun: set[int] = set()
        tasks = [
            asyncio.create_task(
                cramped.client.agenerate(
                    channel, **greedy(f"Crowd {number}", 60), on_response=lambda _, number=number: begun.add(number)
                )
            )
            for number in range(12)
        ]
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (await asyncio.to_thread(cramped.client.load)).preemptions_total == before:
            assert time.monotonic() < deadline
            if all(task.done() for task in tasks):
                break
        num_left = sum(tasks[number].cancel() for number in begun)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Generation):
                outcome.expect_ok()
        return num_left

    async def crowds() -> int:
        async with cramped.client.aio_channel() as channel:
            return sum([await crowd(channel) for _ in range(8)])

    with cramped.neighbours(16):
        num_left = asyncio.run(crowds())
    print(f"{num_left} left")
    assert num_left > 8
    cramped.wait_until_idle()


def test_logits_that_are_not_finite(cramped: House) -> None:
    """A request whose logits are all NaN is INTERNAL, NON_FINITE, never to be retried, and alone in that: not its
    neighbours in the batch, nor those who get its blocks of the cache afterwards.
    """
    poison = short(token_ids={"ids": [1000, 1001, tiny_model.POISON, *range(1100, 1130)]})
    with cramped.neighbours(12):
        for sampling in ({"temperature": 0}, {"temperature": 1}, {"temperature": 1, "top_p": 0.5}):
            for output in ({}, {"logprobs": 5}):
                told = cramped.ask(**poison | {"sampling": sampling, "output": output})
                told.expect(grpc.StatusCode.INTERNAL, "NON_FINITE")
                assert told.status.pushback_ms == -1
                assert told.responses == []
        forced = short(sampling={"allowed_token_ids": [tiny_model.POISON]})
        halfway = cramped.ask(**forced)  # its own output poisons it
        halfway.expect(grpc.StatusCode.INTERNAL, "NON_FINITE")
        assert halfway.token_ids == [tiny_model.POISON]
    cramped.wait_until_idle()
    # Prompts as long as the pool, so that every block that held a NaN is used again.
    for _ in range(3):
        fills = short(token_ids={"ids": list(range(2000, 2090))}, cache={"bypass": True})
        assert len(cramped.ask(**fills).expect_ok().token_ids) == 4


# ------------------------------------------------------------------------------------ surroundings that turn against us


def test_too_few_descriptors_for_its_connections(tiny: Path) -> None:
    """With 256 descriptors and 500 connections: those who are in are served as ever, and once the crowd has left new
    connections are served, too.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 700, "the test itself needs descriptors"
    command = ("bash", "-c", 'ulimit -n 256; exec "$0" "$@"', SERVE)
    with tiny_house(tiny, command=command) as house:
        lines = []
        with house.neighbours():
            for _ in range(500):
                with contextlib.suppress(OSError):
                    lines.append(connect(house.server.address, timeout_s=5.0))
                    lines[-1].sendall(PREFACE + frame(4, 0, 0))
            assert len(lines) > 300
            house.ask(**short()).expect_ok()
        for line in lines:
            line.close()
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            with ReflectionClient(house.server.address) as newcomer:
                try:
                    assert newcomer.health.check("readiness", timeout_s=10.0) == "SERVING"
                    break
                except grpc.RpcError as error:
                    if time.monotonic() > deadline:
                        raise AssertionError(f"nobody new gets in: {Status.of(error)}") from None
        with house.neighbours():
            pass
        assert len(house.server.raw_stderr) < 200_000


def test_the_wall_clock_steps_back_an_hour(tiny: Path, tmp_path: Path) -> None:
    """A wall clock that steps back an hour, and forward by two, in both processes: no stream, queue, deadline or
    step deadline notices; only what is shown as a time of day does. (But for one thing: what a call has left of its own
    deadline is gRPC's to tell, by a clock that this test cannot step; see `clock/sitecustomize.py`.)
    """
    clock = Clock(tmp_path)

    def age_s(house: House) -> float:
        uptime = house.client.call("InfoService/GetServerInfo").uptime.ToTimedelta().total_seconds()
        assert 0 <= uptime < 1800
        return float(uptime)

    with tiny_house(tiny, env=clock.env, step_deadline=60.0) as house:
        assert clock.pids() >= {house.server.pid, house.server.engine_pid()}
        age = age_s(house)
        for offset_s in (-3600.0, 3600.0, -3600.0):
            with house.neighbours(NUM_ALONE), house.client.health.watch("readiness") as watch:
                clock.step(offset_s)
                house.ask(**short(request_id=f"at {offset_s}")).expect_ok()
                late = house.ask(**greedy("Go on", 2000), timeout_s=0.5)
                late.expect(grpc.StatusCode.DEADLINE_EXCEEDED)
                assert len(late.responses) > 1
                assert watch.states == ["SERVING"]
            assert age <= (age := age_s(house))
        assert house.server.stop() == 0
    times = _shown_times(house.server.logs)
    assert any(later < earlier - 3000 for earlier, later in itertools.pairwise(times)), "the clock did step"


def _shown_times(logs: Sequence[Mapping[str, Any]]) -> list[float]:
    from datetime import datetime  # noqa: PLC0415 - only here is a time of day of interest

    return [datetime.fromisoformat(record["timestamp"]).timestamp() for record in logs]
