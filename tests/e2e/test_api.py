"""The protocol's promises, one by one, as a client that has learned it through reflection finds them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from tests.e2e.harness import INFERENCE, Generation, ReflectionClient, Server, Status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY: dict[str, Any] = {"temperature": 0}
PROMPT = "The capital of France is"
EOS = 2


def fields(**changes: Any) -> dict[str, Any]:
    """A short greedy request, with its tokens."""
    return {
        "text": PROMPT,
        "sampling": GREEDY,
        "stopping": {"max_tokens": 8},
        "output": {"token_ids": True},
    } | changes


@pytest.fixture(scope="module")
def info(client: ReflectionClient) -> Any:
    return client.call("InfoService/GetModelInfo")


def refused(call: Callable[[], Any]) -> Status:
    """The status of a unary call that must fail."""
    with pytest.raises(grpc.RpcError) as told:
        call()
    status = Status.of(told.value)
    assert status.details_bytes <= 1024
    return status


# ----------------------------------------------------------------------------------------------------------- Generate


def test_deltas_are_introduced_and_concluded(client: ReflectionClient) -> None:
    """`prompt` is on the first message alone; `finish` and `usage` on the last alone, which is the last delta itself;
    the counts are those of the tokens sent.
    """
    generation = client.generate(**fields()).expect_ok()
    first, *_, last = generation.responses
    for response in generation.responses:
        assert response.HasField("prompt") == (response is first)
        assert response.HasField("finish") == (response is last)
        assert response.HasField("usage") == (response is last)
        assert response.text or response.tokens or response is last
    assert generation.finish_reason == "MAX_TOKENS"
    assert generation.usage.completion == len(generation.token_ids) == 8
    assert generation.usage.prompt == first.prompt.count == 5
    assert generation.usage.cached == first.prompt.cached


def test_several_sequences_of_one_prompt(client: ReflectionClient, info: Any) -> None:
    """`n` deltas' streams in one, told apart by `index`: each finishes once, the first is what a request for one gets,
    usage comes once and counts the tokens of all; greedy ones are equal; Complete folds the same."""
    asked = fields(sampling={"n": 4, "seed": "77", "temperature": 0.9}, cache={"bypass": True})
    generation = client.generate(**asked).expect_ok()
    token_ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    finished = []
    for response in generation.responses:
        token_ids.setdefault(response.index, []).extend(token.id for token in response.tokens)
        texts[response.index] = texts.get(response.index, "") + response.text
        finished += [response.index] * response.HasField("finish")
        assert response.HasField("usage") == (response is generation.responses[-1])
    assert sorted(finished) == sorted(token_ids) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in token_ids.values()}) == 4
    usage = generation.responses[-1].usage
    assert (usage.prompt, usage.completion, usage.cached) == (5, sum(map(len, token_ids.values())), 0)
    single = client.generate(**asked | {"sampling": {"seed": "77", "temperature": 0.9}}).expect_ok()
    assert (single.token_ids, single.text) == (token_ids[0], texts[0])
    complete = client.complete(**asked)
    assert [(one.index, one.text, [token.id for token in one.tokens]) for one in complete.completions] == [
        (index, texts[index], token_ids[index]) for index in range(4)
    ]
    assert complete.usage == usage
    greedy = client.complete(**fields(sampling={**GREEDY, "n": info.limits.max_sequences}))
    assert [one.index for one in greedy.completions] == list(range(info.limits.max_sequences))
    assert len({one.text for one in greedy.completions}) == 1
    assert info.capabilities.multiple_sequences
    for n in (0, info.limits.max_sequences + 1):
        told = client.generate(**fields(sampling={"n": n})).expect(INVALID)
        assert list(told.status.field_violations) == ["sampling.n"]
    told = client.generate(**fields(sampling={"n": 2}, resume_token_ids=[5])).expect(INVALID)
    assert list(told.status.field_violations) == ["resume_token_ids"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": {"seed": "77", "temperature": 0.9}, "output": {"logprobs": 3}},
        {"stopping": {"max_tokens": 30, "stop_strings": ["answer"]}},
        {"output": {"text": False, "token_ids": True}},
        {"stopping": {"max_tokens": 5}, "resume_token_ids": [7042, 30], "sampling": {"temperature": 0}},
    ],
    ids=["greedy", "seeded", "stopped", "ids alone", "resumed"],
)
def test_complete_is_the_fold_of_generate(client: ReflectionClient, changes: dict[str, Any]) -> None:
    """Complete's answer is what Generate's deltas add up to: text, tokens, logprobs, finish, usage."""
    request = fields(cache={"bypass": True}) | changes
    generation = client.generate(**request).expect_ok()
    whole = client.complete(**request)
    (completion,) = whole.completions
    assert completion.text == generation.text
    assert [token.id for token in completion.tokens] == generation.token_ids
    for mine, theirs in zip(completion.tokens, generation.tokens, strict=True):
        assert mine.HasField("logprob") == theirs.HasField("logprob")
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [top.id for top in mine.top] == [top.id for top in theirs.top]
    assert completion.finish == generation.finish
    assert whole.usage == generation.usage
    assert whole.prompt.count == generation.prompt.count
    if changes.get("sampling", {}).get("seed"):
        assert whole.prompt.seed == generation.prompt.seed == 77


def test_output_holds_what_was_asked_for(client: ReflectionClient) -> None:
    """Text by default and nothing else; tokens if ids or logprobs are asked for; logprobs 0 is the emitted token's own
    alone; k adds the k best, best first, and a greedy token is the first of them.
    """
    plain = client.generate(**fields(output={})).expect_ok()
    assert plain.text.startswith(" Paris")
    assert plain.tokens == []
    ids = client.generate(**fields(output={"text": False, "token_ids": True})).expect_ok()
    assert ids.text == ""
    assert all(not token.HasField("logprob") and not token.HasField("rank") and not token.top for token in ids.tokens)
    own = client.generate(**fields(output={"logprobs": 0})).expect_ok()
    assert own.token_ids == ids.token_ids
    assert all(token.logprob < 0 and token.rank == 1 and not token.top for token in own.tokens)
    five = client.generate(**fields(output={"logprobs": 5})).expect_ok()
    for token in five.tokens:
        best = [top.logprob for top in token.top]
        assert len(best) == 5
        assert best == sorted(best, reverse=True)
        assert token.top[0].id == token.id
        assert token.top[0].logprob == token.logprob


def test_unset_is_not_zero(client: ReflectionClient, info: Any) -> None:
    """Absent values mean the defaults that GetModelInfo tells, and a zero means zero: temperature 0 is greedy where an
    absent one samples; max_tokens 0 is refused where an absent one is the limit; seed 0 is a seed where an absent one
    is drawn; logprobs 0 asks for logprobs.
    """
    assert info.sampling_defaults.temperature == 1
    absent = [client.generate(**fields(sampling={}, stopping={"max_tokens": 16})).expect_ok() for _ in range(3)]
    seeds = {generation.prompt.seed for generation in absent}
    assert len(seeds) == 3, "drawn, each its own"
    assert len({tuple(generation.token_ids) for generation in absent}) > 1, "sampled"
    given = fields(sampling={"temperature": 1, "seed": str(absent[0].prompt.seed)}, stopping={"max_tokens": 16})
    assert client.generate(**given).expect_ok().token_ids == absent[0].token_ids, "the seed told is the seed used"
    zero = [client.generate(**fields(sampling={"seed": "0"})).expect_ok() for _ in range(2)]
    assert [generation.prompt.seed for generation in zero] == [0, 0]
    assert zero[0].token_ids == zero[1].token_ids
    client.generate(**fields(stopping={"max_tokens": 0})).expect(INVALID)
    long = client.stream(**fields(stopping={"ignore_eos": True}))
    for count, _ in enumerate(long):
        if count == 40:
            break
    long.cancel()


def test_max_tokens_zero_is_for_prompt_logprobs_alone(client: ReflectionClient) -> None:
    """With prompt_logprobs the prompt is all that is computed: one message with its tokens, MAX_TOKENS, no output. The
    first token has nothing before it; without the option a 0 is refused.
    """
    asked = fields(stopping={"max_tokens": 0}, output={"prompt_logprobs": 2})
    answer = client.generate(**asked).expect_ok()
    (only,) = answer.responses
    assert (only.text, len(only.tokens), answer.finish_reason) == ("", 0, "MAX_TOKENS")
    assert (only.usage.prompt, only.usage.completion, only.usage.cached) == (only.prompt.count, 0, 0)
    first, *others = only.prompt.tokens
    assert len(only.prompt.tokens) == only.prompt.count
    assert not first.HasField("logprob")
    assert all(token.logprob <= 0 and token.rank >= 1 and len(token.top) == 2 for token in others)
    again = client.complete(**asked)
    assert [token.id for token in again.prompt.tokens] == [token.id for token in only.prompt.tokens]
    client.generate(**fields(stopping={"max_tokens": 0})).expect(INVALID)


def test_stopping_by_tokens(client: ReflectionClient) -> None:
    """EOS and stop tokens end a sequence, count in tokens and usage and not in text, and are told apart; min_tokens
    defers both; ignore_eos lets EOS pass; the first token may be the last.
    """

    def forced(token_id: int, **stopping: Any) -> Generation:
        # Nothing else can be sampled, so min_tokens would leave nothing: this one is near certain instead.
        sampling = {**GREEDY, "logit_bias": {str(token_id): 100.0}}
        return client.generate(**fields(sampling=sampling, stopping={"max_tokens": 4, **stopping})).expect_ok()

    at_once = forced(EOS)
    assert (at_once.finish_reason, at_once.finish.matched_token_id, at_once.text) == ("EOS", EOS, "")
    assert at_once.token_ids == [EOS]
    assert at_once.usage.completion == 1
    deferred = forced(EOS, min_tokens=2)
    assert deferred.finish_reason == "EOS"
    assert deferred.token_ids[2:] == [EOS]
    assert EOS not in deferred.token_ids[:2]
    ignored = forced(EOS, ignore_eos=True)
    assert (ignored.finish_reason, ignored.token_ids) == ("MAX_TOKENS", [EOS] * 4)
    stop = forced(7042, stop_token_ids=[7042])
    assert (stop.finish_reason, stop.finish.matched_token_id, stop.text) == ("STOP_TOKEN", 7042, "")
    assert stop.token_ids == [7042]
    assert forced(7042, stop_token_ids=[7042], min_tokens=3).token_ids[3:] == [7042]


def test_a_resumed_stream_goes_on_as_it_would_have(client: ReflectionClient) -> None:
    """Cut anywhere and resumed with its seed, a sampled stream gives the tokens and the text that were still to come;
    what it has had counts for max_tokens and not as completion.
    """
    asked = fields(sampling={"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.5}, stopping={"max_tokens": 24})
    whole = client.generate(**asked).expect_ok()
    seeded = asked["sampling"] | {"seed": str(whole.prompt.seed)}
    for cut in (1, 7, 16, len(whole.token_ids)):
        had, to_come = whole.token_ids[:cut], whole.token_ids[cut:]
        resumed = client.generate(**asked | {"sampling": seeded, "resume_token_ids": had}).expect_ok()
        assert resumed.token_ids == to_come
        assert whole.text.endswith(resumed.text)
        assert resumed.usage.completion == len(to_come)
        assert resumed.finish_reason == whole.finish_reason
    assert client.generate(**asked | {"sampling": seeded, "resume_token_ids": whole.token_ids}).text == ""


def test_request_ids(client: ReflectionClient) -> None:
    """A given request_id is echoed on every message, an absent one is made; a live one is refused with ALREADY_EXISTS,
    for Complete as for Generate, and is free again after the end.
    """
    made = {client.generate(**fields()).expect_ok().responses[0].request_id for _ in range(2)}
    assert len(made) == 2
    assert all(made)
    given = client.generate(**fields(request_id="mine ~!")).expect_ok()
    assert {response.request_id for response in given.responses} == {"mine ~!"}
    live = client.stream(**fields(request_id="twin", stopping={"max_tokens": 1000, "ignore_eos": True}))
    next(live)
    told = client.generate(**fields(request_id="twin")).expect(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
    assert told.status.details_bytes <= 1024
    assert refused(lambda: client.complete(**fields(request_id="twin"))).code is grpc.StatusCode.ALREADY_EXISTS
    next(live)
    live.cancel()
    deadline = time.monotonic() + 60.0
    while (again := client.generate(**fields(request_id="twin"))).code is grpc.StatusCode.ALREADY_EXISTS:
        assert time.monotonic() < deadline
    again.expect_ok()
    for bad in ("", "a" * 129, "tab\t", "naïve"):
        status = client.generate(**fields(request_id=bad)).expect(INVALID).status
        assert set(status.field_violations) == {"request_id"}
    client.generate(**fields(request_id="a" * 128)).expect_ok()


def test_another_model_is_not_found(client: ReflectionClient, info: Any) -> None:
    """A model that is not served is NOT_FOUND, whatever else is wrong, and the answer tells which one is; its own name
    and an empty one are served.
    """
    told = client.generate(**fields(model="gpt-7", sampling={"temperature": -1}))
    told.expect(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    assert told.status.metadata == {"served_model": info.model}
    for path, more in (
        (f"{INFERENCE}/Complete", {"text": "a"}),
        ("TokenizerService/Tokenize", {"text": "a"}),
        ("TokenizerService/Detokenize", {}),
        ("InfoService/GetModelInfo", {}),
    ):
        assert refused(lambda p=path, m=more: client.call(p, model="x", **m)).code is grpc.StatusCode.NOT_FOUND
    client.generate(**fields(model=info.model)).expect_ok()
    client.generate(**fields(model="")).expect_ok()


def test_neutral_values_are_served(client: ReflectionClient) -> None:
    """What asks for nothing special is served: n 1, stream_interval 1, resume_on_engine_death either way."""
    neutral = fields(
        sampling={**GREEDY, "n": 1},
        output={"token_ids": True, "stream_interval": 1},
        resume_on_engine_death=False,
    )
    client.generate(**neutral).expect_ok()


def test_all_violations_in_one_answer(client: ReflectionClient, info: Any) -> None:
    """Everything that is wrong with a request is told at once, each field with its bounds, and none of it quotes what
    was sent.
    """
    status = (
        client.generate(
            text="Quetzalbramble",
            sampling={"temperature": 101, "top_p": 0, "min_p": 2, "top_k": -1, "presence_penalty": 3},
            stopping={"max_tokens": -1, "stop_strings": [""]},
            output={"logprobs": 21},
            priority=101,
        )
        .expect(INVALID)
        .status
    )
    assert dict(status.field_violations) == {
        "sampling.temperature": "must be in [0, 100]",
        "sampling.top_p": "must be in (0, 1]",
        "sampling.min_p": "must be in [0, 1]",
        "sampling.top_k": "must be in [0, 2147483647]",
        "sampling.presence_penalty": "must be in [-2, 2]",
        "stopping.max_tokens": f"must be in [1, {info.limits.max_output_tokens}]",
        "stopping.stop_strings[0]": f"must be 1 to {info.limits.max_stop_string_bytes} bytes",
        "output.logprobs": f"must be in [0, {info.limits.max_logprobs}]",
        "priority": "must be in [-100, 100]",
    }
    assert "Quetzalbramble" not in repr(status)
    assert status.details_bytes <= 1024
    assert status.pushback_ms is None


def test_a_status_stays_within_a_kilobyte(client: ReflectionClient, info: Any) -> None:
    """However much is wrong, the status has at most 1 KB: lists are cut, and the answer says how many are missing."""
    everything = {
        "sampling": {
            "temperature": 101,
            "top_p": 2,
            "min_p": 2,
            "top_k": -1,
            "presence_penalty": 3,
            "frequency_penalty": 3,
            "repetition_penalty": 0,
            "n": 0,
            "logit_bias": {str(info.vocab_size + number): 1000.0 for number in range(200)},
            "allowed_token_ids": [info.vocab_size] * 200,
        },
        "stopping": {
            "max_tokens": -1,
            "min_tokens": -1,
            "stop_strings": [""] * 100,
            "stop_token_ids": [info.vocab_size] * 100,
        },
        "output": {"logprobs": -1, "prompt_logprobs": -1, "stream_interval": 0},
        "chat": {"messages": [{"role": "not a role!", "content": ""}] * 2000},
        "cache": {"salt": "s" * 200},
        "priority": 1000,
        "request_id": "",
    }
    status = client.generate(**everything).expect(INVALID).status
    assert 512 < status.details_bytes <= 1024
    descriptions = list(status.field_violations.values())
    assert len(descriptions) > 8
    assert any(text.startswith("and ") and text.endswith(" more") for text in descriptions)


def test_limits_are_what_model_info_tells(client: ReflectionClient, info: Any) -> None:
    """At each limit of GetModelInfo a request is served, one beyond it is INVALID_ARGUMENT for that field."""
    limits = info.limits
    at: list[dict[str, Any]] = [
        {"stopping": {"max_tokens": 1, "stop_strings": ["q" * limits.max_stop_string_bytes] * limits.max_stop_strings}},
        {"stopping": {"max_tokens": 1, "stop_token_ids": list(range(1000, 1000 + limits.max_stop_token_ids))}},
        {"stopping": {"max_tokens": 1}, "output": {"logprobs": limits.max_logprobs}},
        {"stopping": {"max_tokens": limits.max_output_tokens}, "sampling": {"logit_bias": {str(EOS): 100}}},
        {"stopping": {"max_tokens": 1}, "token_ids": {"ids": [info.vocab_size - 1]}},
    ]
    for changes in at:
        request = fields(**changes)
        if "token_ids" in changes:
            del request["text"]
        client.generate(**request).expect_ok()
    beyond: dict[str, dict[str, Any]] = {
        "stopping.stop_strings": {"stopping": {"stop_strings": ["q"] * (limits.max_stop_strings + 1)}},
        "stopping.stop_strings[0]": {"stopping": {"stop_strings": ["q" * (limits.max_stop_string_bytes + 1)]}},
        "stopping.stop_token_ids": {"stopping": {"stop_token_ids": list(range(limits.max_stop_token_ids + 1))}},
        "output.logprobs": {"output": {"logprobs": limits.max_logprobs + 1}},
        "stopping.max_tokens": {"stopping": {"max_tokens": limits.max_output_tokens + 1}},
        "resume_token_ids[0]": {"resume_token_ids": [info.vocab_size]},
    }
    for field, changes in beyond.items():
        assert set(client.generate(**fields(**changes)).expect(INVALID).status.field_violations) == {field}


def test_no_headers_before_the_first_token(server: Server, client: ReflectionClient) -> None:
    """A call that fails has sent trailers only, so client libraries may retry it; a stream's headers come with its
    first token, not before.
    """
    failed = client.stream(text="")
    with pytest.raises(grpc.RpcError):
        next(failed)
    assert list(failed.initial_metadata()) == []

    headers = threading.Event()

    def wait_for_headers() -> None:
        stream.initial_metadata()  # blocks until they are there
        headers.set()

    engine_pid = server.engine_pid()
    os.kill(engine_pid, signal.SIGSTOP)
    try:
        stream = client.stream(**fields(stopping={"max_tokens": 2}))
        waiter = threading.Thread(target=wait_for_headers)
        waiter.start()
        for _ in range(20):  # answered on the same connection, after whatever the stream's handler has sent
            client.call("InfoService/GetLoad")
        assert not headers.is_set()
    finally:
        os.kill(engine_pid, signal.SIGCONT)
    next(stream)
    assert headers.wait(60.0)
    waiter.join(60.0)
    list(stream)


# ----------------------------------------------------------------------------------------------------- the other rpcs


def test_tokenize_tells_what_generate_is_given(client: ReflectionClient, info: Any) -> None:
    """Tokenize and Generate agree on text and on chats; pieces are each token's own text; empty text is no tokens."""
    text = client.call("TokenizerService/Tokenize", text=PROMPT, with_pieces=True)
    assert "".join(text.pieces) == PROMPT
    assert text.max_prompt_tokens == info.limits.max_prompt_tokens
    by_ids = client.generate(token_ids={"ids": list(text.ids)}, **_without_text(fields())).expect_ok()
    by_text = client.generate(**fields()).expect_ok()
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.prompt.count == by_text.prompt.count == len(text.ids)
    chat = {"messages": [{"role": "user", "content": "Say hello."}]}
    rendered = client.call("TokenizerService/Tokenize", chat=chat)
    by_chat = client.generate(chat=chat, **_without_text(fields())).expect_ok()
    by_ids = client.generate(token_ids={"ids": list(rendered.ids)}, **_without_text(fields())).expect_ok()
    assert by_chat.token_ids == by_ids.token_ids
    assert by_chat.prompt.count == len(rendered.ids)
    unprompted = client.call("TokenizerService/Tokenize", chat=chat | {"add_generation_prompt": False})
    assert list(rendered.ids)[: len(unprompted.ids)] == list(unprompted.ids)
    assert len(rendered.ids) > len(unprompted.ids)
    assert list(client.call("TokenizerService/Tokenize", text="").ids) == []
    assert "input" in refused(lambda: client.call("TokenizerService/Tokenize")).field_violations


def test_detokenize_is_the_way_back(client: ReflectionClient, info: Any) -> None:
    """Detokenize gives any text back; special tokens show if asked; ids beyond the vocabulary are refused."""
    text = "Grüße, 世界 🎉 สวัสดี\n\ttabs and  spaces"
    ids = list(client.call("TokenizerService/Tokenize", text=text).ids)
    assert client.call("TokenizerService/Detokenize", ids=ids).text == text
    assert client.call("TokenizerService/Detokenize", ids=[EOS, *ids, EOS]).text == text
    shown = client.call("TokenizerService/Detokenize", ids=[EOS], skip_special_tokens=False)
    assert shown.text == "<|im_end|>"
    assert client.call("TokenizerService/Detokenize").text == ""
    status = refused(lambda: client.call("TokenizerService/Detokenize", ids=[1, info.vocab_size]))
    assert set(status.field_violations) == {"ids[1]"}


def test_model_info(info: Any) -> None:
    """GetModelInfo knows the default model."""
    assert info.model == "SmolLM2-135M-Instruct"
    assert info.model_type == "llama"
    assert info.num_parameters == 134_515_008
    assert info.vocab_size == 49_152
    assert list(info.eos_token_ids) == [EOS]
    assert info.dtype == "float32"
    assert info.limits.max_prompt_tokens < info.limits.max_model_len
    assert info.limits.max_request_bytes >= 4 * 1024 * 1024
    on = {field.name for field, value in info.capabilities.ListFields() if value}
    assert on == {
        "chat",
        "guided",
        "multiple_sequences",
        "prompt_logprobs",
        "resume_on_engine_death",
        "stream_interval",
        "time_limits",
    }


def test_server_info(client: ReflectionClient, server: Server) -> None:
    """GetServerInfo tells the one engine's state, pid, backend and pool, and the process's age."""
    told = client.call("InfoService/GetServerInfo")
    assert told.version
    assert told.start_time.seconds > 1_700_000_000
    assert told.uptime.ToTimedelta().total_seconds() > 0
    (engine,) = told.engines
    shown = json_format.MessageToDict(engine, preserving_proto_field_name=True)
    assert shown["state"] == "ENGINE_STATE_READY"
    assert engine.pid == server.engine_pid()
    assert (engine.device, engine.attention_backend, engine.attention_backend_note) == ("cpu", "cpu", "")
    assert engine.num_kv_blocks * engine.block_size >= 1024
    assert engine.startup.ToTimedelta().total_seconds() > 0


@pytest.fixture
def held(client: ReflectionClient) -> Iterator[Any]:
    """A stream that runs meanwhile."""
    stream = client.stream(**fields(stopping={"max_tokens": 1000, "ignore_eos": True}))
    next(stream)
    yield stream
    stream.cancel()


def test_load_counts_what_runs(client: ReflectionClient, held: Any) -> None:
    """GetLoad counts a running stream and its blocks, and neither after its end."""
    busy = client.load()
    assert busy.running >= 1
    assert 0 < busy.kv_blocks_used <= busy.kv_blocks_total
    held.cancel()
    deadline = time.monotonic() + 60.0
    while (idle := client.load()).kv_blocks_used or idle.running or idle.waiting or idle.waiting_tokens:
        assert time.monotonic() < deadline, idle
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------------------- health


def test_health_by_name(client: ReflectionClient) -> None:
    """Check, List and Watch know the same names; an unknown one is NOT_FOUND for Check and SERVICE_UNKNOWN for Watch,
    which stays open: a watching client takes an end for a failure.
    """
    names = {"", "readiness", "liveness", INFERENCE}
    listed = client.health.list()
    assert names <= set(listed)
    for name in listed:
        assert client.health.check(name) == listed[name] == "SERVING"
        with client.health.watch(name) as watch:
            watch.wait_for("SERVING")
            assert watch.states == ["SERVING"]
            assert watch.status is None
    assert refused(lambda: client.health.check("nobody")).code is grpc.StatusCode.NOT_FOUND
    with client.health.watch("nobody") as watch:
        watch.wait_for("SERVICE_UNKNOWN")
        time.sleep(0.2)
        assert watch.status is None


def test_admin_is_not_there_unless_enabled(client: ReflectionClient) -> None:
    """AdminService is not registered: a call to it is UNIMPLEMENTED, as is a method nobody has."""
    for path in ("/emberline.v1.AdminService/Drain", f"/{INFERENCE}/Nothing", "/nobody.Service/Method"):
        status = refused(lambda p=path: client.channel.unary_unary(p)(b"", timeout=60.0))
        assert status.code is grpc.StatusCode.UNIMPLEMENTED


def _without_text(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "text"}
