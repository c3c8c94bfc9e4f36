"""Exact: what a crowd is told, transformers would have said to each alone. The design says what that word means."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.e2e.harness import INFERENCE, ROOT, ReflectionClient, Server
from tests.e2e.oracle import Oracle, default_oracle, expect_complete, expect_continuation, generate_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 20_262
BLOCK_SIZE = 16
NUM_KV_BLOCKS = 108
"""1,728 tokens: the longest request just fits. What grows beyond the pool must be preempted."""
STEP_TOKENS = 256
CROWD_TIMEOUT_S = 600.0

# Around every edge there is (one token, blocks, steps, several chunks), and otherwise mostly short.
EDGE_PROMPTS = [1, 1, 2, 15, 16, 17, 31, 32, 33, STEP_TOKENS - 1, STEP_TOKENS, STEP_TOKENS + 1, 700, 1499, 1500]
EDGE_OUTPUTS = [1, 128, 2, 15, 16, 17, 1, 128, 31, 64, 1, 16, 8, 17, 128]
NUM_GROWING = 18
"""Short prompts with long outputs, first in line: all are let in, and together they need 1.4 times the pool."""
NUM_REQUESTS = 64
NUM_CANCELLED = 32
CANCELLED_PRIORITY = 10
"""Of some of those that are cancelled: they push others out when they come."""
NUM_SHARED_STARTS = 3


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return default_oracle()


@pytest.fixture(scope="module")
def tight_server() -> Iterator[Server]:
    """The default model in float32, with a KV pool that a crowd outgrows."""
    with Server(
        dtype="float32", num_kv_blocks=NUM_KV_BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=STEP_TOKENS
    ) as server:
        yield server


@pytest.fixture(scope="module")
def tight_client(tight_server: Server) -> Iterator[ReflectionClient]:
    with ReflectionClient(tight_server.address) as connected:
        yield connected


class Library:
    """Prompts cut from a text that every clone has: the licence."""

    def __init__(self, oracle: Oracle, seed: int) -> None:
        self.choices = random.Random(seed)
        self._ids = oracle.encode((ROOT / "LICENSE").read_text())
        assert len(self._ids) > 2000

    def prompt(self, num_tokens: int) -> list[int]:
        """Half of them begin at one of a few places, and so share what they begin with."""
        if self.choices.random() < 0.5:
            start = 100 * self.choices.randrange(NUM_SHARED_STARTS)
        else:
            start = self.choices.randrange(len(self._ids) - num_tokens)
        return self._ids[start : start + num_tokens]

    def log_uniform(self, low: int, high: int) -> int:
        return round(math.exp(self.choices.uniform(math.log(low), math.log(high))))


def greedy(prompt_ids: list[int], max_tokens: int, **stopping: Any) -> dict[str, Any]:
    return {
        "token_ids": {"ids": prompt_ids},
        "sampling": {"temperature": 0},
        "stopping": {"max_tokens": max_tokens, **stopping},
        "output": {"token_ids": True},
    }


def test_a_crowd_of_64_is_exact(tight_client: ReflectionClient, oracle: Oracle) -> None:
    """64 greedy streams at once, with prompts of 1 to 1,500 tokens and outputs of 1 to 128, shared prefixes, a KV pool
    that makes some of them be preempted, and others beside them that are cancelled at random moments: every token is
    the one that transformers would have chosen, none is lost, none repeated, and the text is theirs.
    """
    library = Library(oracle, SEED)
    choices = library.choices
    growing = [(library.log_uniform(8, 48), choices.randrange(112, 129)) for _ in range(NUM_GROWING)]
    lengths = list(zip(EDGE_PROMPTS, EDGE_OUTPUTS, strict=True))
    while len(lengths) < NUM_REQUESTS - NUM_GROWING:
        lengths.append((library.log_uniform(4, 160), library.log_uniform(1, 64)))
    choices.shuffle(lengths)
    requests = [
        greedy(library.prompt(num_prompt), num_output, ignore_eos=choices.random() < 0.5)
        for num_prompt, num_output in [*growing, *lengths]
    ]
    cancelled = [
        {
            **greedy(library.prompt(library.log_uniform(1, 400)), 256, ignore_eos=True),
            "priority": CANCELLED_PRIORITY * (number % 3 == 0),
        }
        for number in range(NUM_CANCELLED)
    ]
    before = tight_client.load().preemptions_total

    async def run() -> tuple[list[Any], list[int]]:
        async with tight_client.aio_channel() as channel:
            leavers = [
                asyncio.create_task(_leave_early(tight_client, channel, fields, number))
                for number, fields in enumerate(cancelled)
            ]
            answers = await generate_all(tight_client, requests, timeout_s=CROWD_TIMEOUT_S)
            return answers, await asyncio.gather(*leavers)

    begun_s = time.monotonic()
    answers, num_messages = asyncio.run(run())
    served_s = time.monotonic() - begun_s
    num_preemptions = tight_client.load().preemptions_total - before
    for fields, answer in zip(requests, answers, strict=True):
        expect_complete(answer, fields, oracle.eos_token_ids)
        assert answer.text == oracle.text(fields["token_ids"]["ids"], answer.token_ids)
    verdict = oracle.judge_all(requests, answers)
    print(
        f"seed {SEED}: {verdict.num_tokens} tokens ({verdict.num_decisive} decisive) in {served_s:.1f} s, "
        f"{num_preemptions} preemptions, {sum(answer.prompt.cached for answer in answers)} tokens from the cache, "
        f"{len(cancelled)} cancelled after {sum(num_messages)} messages; judged in "
        f"{time.monotonic() - begun_s - served_s:.1f} s"
    )
    verdict.expect_exact(decisive=0.99)
    assert num_preemptions > 0
    assert any(answer.prompt.cached for answer in answers)
    assert sum(num_messages) > 0


async def _leave_early(client: ReflectionClient, channel: grpc.aio.Channel, fields: dict[str, Any], number: int) -> int:
    """Cancels a stream after some messages, or after a time, whatever has come by then; returns what had come."""
    choices = random.Random(SEED + number)
    await asyncio.sleep(choices.uniform(0.0, 5.0))
    call = client.stub(f"{INFERENCE}/Generate", channel)(
        client.request(f"{INFERENCE}/Generate", **fields), timeout=CROWD_TIMEOUT_S
    )
    if number % 2:
        asyncio.get_running_loop().call_later(choices.uniform(0.0, 3.0), call.cancel)
    num_messages = 0
    try:
        async for _ in call:
            num_messages += 1
            if number % 2 == 0 and num_messages == 1 + number % 7:
                call.cancel()
    except asyncio.CancelledError:
        assert call.cancelled()
    return num_messages


# ----------------------------------------------------------------------------------------------------- prefix caching


def test_the_prefix_cache_saves_work_and_changes_nothing(client: ReflectionClient, oracle: Oracle) -> None:
    """A prefix that the server has seen is taken from the cache, and `cached` tells so in whole blocks; a caller who
    bypasses the cache or has another salt gets none of it. The tokens are the same each time.
    """
    block_size = client.call("InfoService/GetServerInfo").engines[0].block_size
    library = Library(oracle, SEED + 1)
    shared = library.prompt(6 * block_size + 5)
    fields = greedy(shared, 12)

    def ask(**cache: Any) -> Any:
        return client.generate(**fields, cache=cache).expect_ok()

    salt, other_salt = secrets.token_hex(8), secrets.token_hex(8)
    first, second = ask(salt=salt), ask(salt=salt)
    strangers = [ask(salt=other_salt), ask(salt=salt, bypass=True), ask(bypass=True), ask(bypass=True)]

    assert first.prompt.cached == 0
    assert second.prompt.cached == 6 * block_size
    assert second.usage.cached == second.prompt.cached
    assert [stranger.prompt.cached for stranger in strangers] == [0, 0, 0, 0]
    assert ask(salt=other_salt).prompt.cached == 6 * block_size
    for answer in (first, second, *strangers):
        assert answer.text == oracle.text(shared, answer.token_ids)
        oracle.judge(shared, answer.token_ids, fields).expect_exact()
        assert answer.token_ids == first.token_ids


def test_what_bypasses_the_cache_leaves_nothing_in_it(client: ReflectionClient, oracle: Oracle) -> None:
    """A request that bypasses the cache is not found there by the next one, with any salt or none."""
    prompt = [secrets.randbelow(40_000) for _ in range(100)]
    first = client.generate(**greedy(prompt, 2), cache={"bypass": True}).expect_ok()
    second = client.generate(**greedy(prompt, 2)).expect_ok()
    third = client.generate(**greedy(prompt, 2)).expect_ok()
    assert [answer.prompt.cached for answer in (first, second)] == [0, 0]
    assert third.prompt.cached > 0


def test_a_cached_prefix_ends_where_prompts_part(client: ReflectionClient, oracle: Oracle) -> None:
    """Two prompts that part inside a block share only the blocks before it, whatever tokens follow; so do prompts whose
    later blocks are equal but stand behind another first one. A prompt that is wholly cached still computes its last
    token. Each answer is exact.
    """
    block_size = client.call("InfoService/GetServerInfo").engines[0].block_size
    library = Library(oracle, SEED + 2)
    cache = {"salt": secrets.token_hex(8)}
    base = library.prompt(4 * block_size)
    other_start = [base[0] + 1, *base[1:]]
    parted = [*base[: 2 * block_size + 3], base[2 * block_size + 3] + 1, *base[2 * block_size + 4 :]]
    expected = {0: base, 2 * block_size: parted, 3 * block_size: base}
    for num_cached, prompt in [*expected.items(), (0, other_start)]:
        fields = greedy(prompt, 10)
        answer = client.generate(**fields, cache=cache).expect_ok()
        assert answer.prompt.cached == num_cached
        oracle.judge(prompt, answer.token_ids, fields).expect_exact()


def test_an_answer_becomes_part_of_the_cached_prefix(client: ReflectionClient, oracle: Oracle) -> None:
    """The next turn of a conversation finds the last answer's blocks, and goes on exactly from them."""
    block_size = client.call("InfoService/GetServerInfo").engines[0].block_size
    cache = {"salt": secrets.token_hex(8)}
    prompt = Library(oracle, SEED + 3).prompt(block_size + 3)
    turn = client.generate(**greedy(prompt, 3 * block_size, ignore_eos=True), cache=cache).expect_ok()
    longer = [*prompt, *turn.token_ids, *oracle.encode(" And then")]
    fields = greedy(longer, 12)
    answer = client.generate(**fields, cache=cache).expect_ok()
    # The last token of an answer is never computed, so the block that it would have filled is not there.
    assert answer.prompt.cached == (len(prompt) + len(turn.token_ids) - 1) // block_size * block_size
    oracle.judge(longer, answer.token_ids, fields).expect_exact()


# ------------------------------------------------------------------------------------------------------- resumption


@pytest.fixture(scope="module")
def story(client: ReflectionClient, oracle: Oracle) -> Any:
    """A greedy answer of 40 tokens, from nobody's cache."""
    return client.generate(**STORY, cache={"bypass": True}).expect_ok()


STORY_TEXT = "The lighthouse keeper opened the door and"
STORY: dict[str, Any] = {
    "text": STORY_TEXT,
    "sampling": {"temperature": 0},
    "stopping": {"max_tokens": 40, "ignore_eos": True},
    "output": {"token_ids": True},
}


def test_a_greedy_stream_resumes_at_any_cut(client: ReflectionClient, oracle: Oracle, story: Any) -> None:
    """Resumed after any number of its tokens, a stream says what would have followed: the same tokens, the rest of the
    text. What was resumed counts for max_tokens, and as neither completion nor prompt.
    """
    ids = story.token_ids
    cuts = range(1, len(ids))
    resumed = [{**STORY, "resume_token_ids": ids[:cut], "cache": {"bypass": cut % 2 == 0}} for cut in cuts]
    for cut, answer in zip(cuts, asyncio.run(generate_all(client, resumed)), strict=True):
        assert answer.token_ids == ids[cut:], f"cut at {cut}"
        expect_continuation(story, cut, answer.text)
        expect_complete(answer, STORY, oracle.eos_token_ids, num_resumed=cut)
        assert answer.prompt.count == story.prompt.count
        assert answer.usage.prompt == story.usage.prompt


def test_a_stop_string_is_found_across_the_cut(client: ReflectionClient, oracle: Oracle, story: Any) -> None:
    """A stop string that begins in the resumed tokens and ends in new ones stops the stream where it would have; what
    the first attempt held back for it is not lost, and no part of it leaks.
    """
    start = next(
        start for start in range(40, len(story.text)) if story.text.find(story.text[start : start + 14]) == start
    )
    stop = story.text[start : start + 14]
    stopping = {**STORY["stopping"], "stop_strings": ["never there", stop]}
    whole = client.generate(**{**STORY, "stopping": stopping}).expect_ok()
    assert whole.finish_reason == "STOP_STRING"
    assert whole.finish.matched == stop
    assert whole.text == story.text[:start]
    num_tokens = len(whole.token_ids)
    assert whole.token_ids == story.token_ids[:num_tokens]
    cuts = range(1, num_tokens)
    resumed = [{**STORY, "stopping": stopping, "resume_token_ids": whole.token_ids[:cut]} for cut in cuts]
    for cut, answer in zip(cuts, asyncio.run(generate_all(client, resumed)), strict=True):
        assert answer.finish_reason == "STOP_STRING"
        assert answer.token_ids == whole.token_ids[cut:], f"cut at {cut}"
        assert answer.usage.completion == num_tokens - cut
        expect_continuation(whole, cut, answer.text)


def test_what_is_over_is_over_when_resumed(client: ReflectionClient, story: Any) -> None:
    """A stream resumed with all of its tokens ends at once, for the reason that it had, with no token and no text."""
    ids = story.token_ids
    stop_token = {**STORY["stopping"], "stop_token_ids": [ids[9]], "min_tokens": 9}
    for stopping, num_tokens, reason in (
        (STORY["stopping"], len(ids), "MAX_TOKENS"),
        (stop_token, 10, "STOP_TOKEN"),
        ({**STORY["stopping"], "stop_strings": [story.text[20:30]]}, len(ids), "STOP_STRING"),
    ):
        fields = {**STORY, "stopping": stopping, "resume_token_ids": ids[:num_tokens]}
        answer = client.generate(**fields).expect_ok()
        assert answer.finish_reason == reason
        assert (answer.text, answer.token_ids, answer.usage.completion) == ("", [], 0)


def test_complete_resumes_as_generate_does(client: ReflectionClient, story: Any) -> None:
    """The unary call takes resumed tokens too, and gives the rest alone."""
    answer = client.complete(**STORY, resume_token_ids=story.token_ids[:15])
    (completion,) = answer.completions
    assert [token.id for token in completion.tokens] == story.token_ids[15:]
    assert story.text.endswith(completion.text)
    assert answer.usage.completion == 25


PROMPT_LOGPROBS_TOLERANCE = 1e-3


def test_scored_prompts_are_exact(tight_client: ReflectionClient, oracle: Oracle) -> None:
    """Prompts longer than a step, of one block and of two tokens, scored beside streams that decode, while the cache
    holds the beginnings of all of them: each token has transformers' log-probability, the best tokens are its best, and
    nothing was read from the cache.
    """
    library = Library(oracle, SEED + 1)
    ids = library.prompt(3 * STEP_TOKENS + 7)
    prompts = [ids, ids[:BLOCK_SIZE], ids[: STEP_TOKENS + 1], ids[40:42]]
    neighbours = [greedy(library.prompt(40), 60, ignore_eos=True) for _ in range(6)]
    asyncio.run(generate_all(tight_client, [greedy(ids, 4)]))
    scored = [greedy(prompt, 2) | {"output": {"token_ids": True, "prompt_logprobs": 3}} for prompt in prompts]
    answers = asyncio.run(generate_all(tight_client, [*neighbours, *scored]))[len(neighbours) :]
    oracle.judge_all(scored, answers).expect_exact(0.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        told = answer.prompt
        assert (told.count, told.cached) == (len(prompt), 0)
        assert [token.id for token in told.tokens] == prompt
        expected = oracle.logits(prompt[:1], prompt[1:]).log_softmax(dim=-1)
        for row, token in zip(expected, told.tokens[1:], strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=PROMPT_LOGPROBS_TOLERANCE)
            least = 1 + int((row > row[token.id] + PROMPT_LOGPROBS_TOLERANCE).sum())
            most = int((row > row[token.id] - PROMPT_LOGPROBS_TOLERANCE).sum())
            assert least <= token.rank <= most
            best = row.topk(3).values.tolist()
            assert [one.logprob for one in token.top] == pytest.approx(best, abs=PROMPT_LOGPROBS_TOLERANCE)
            assert row[[one.id for one in token.top]].tolist() == pytest.approx(best, abs=PROMPT_LOGPROBS_TOLERANCE)
