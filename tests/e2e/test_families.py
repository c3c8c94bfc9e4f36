"""Other families than the default model's: served without code for them, exactly, or refused by name.

The models are made here: real architectures of transformers, tiny, with random weights that are large enough for
attention and positions to matter. Their tokenizer has a token per byte.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from tests.e2e.harness import ReflectionClient, Server
from tests.e2e.oracle import Oracle, expect_complete, generate_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 120.0
"""Whatever takes longer hangs."""
MAX_MODEL_LEN = 256
END = 256
"""The id of the one special token; the byte tokens are before it, ids without a text behind."""
COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
SUPPORTED: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**COMMON, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt_neox": GPTNeoXConfig(**COMMON, rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}),
    "gemma": GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
}
REFUSED: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "sliding window": (MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=64), ["mistral", "window", "64"]),
    "soft-capping": (Gemma2Config(**COMMON, num_key_value_heads=2, head_dim=16), ["gemma2", "soft-capped"]),
    "recurrent": (MambaConfig(vocab_size=300, hidden_size=64, state_size=8, num_hidden_layers=2), ["mamba"]),
    "encoder-decoder": (T5Config(vocab_size=300, d_model=32, d_ff=32, num_layers=1, num_heads=2), ["t5", "encoder"]),
    "dynamic RoPE": (
        LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}),
        ["llama", "RoPE", "dynamic"],
    ),
}
FLAGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_kv_blocks": 24,
    "threads": 1,
}
"""384 tokens for eight streams: some are preempted."""


def save_tokenizer(directory: Path) -> None:
    """A token per byte and one special token; no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == END
    tokenizer.save(str(directory / "tokenizer.json"))


def save_model(config: PreTrainedConfig, directory: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("qwen2")`: the directory of that tiny model, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_model(SUPPORTED[name], tmp_path_factory.mktemp(name))
        return made[name]

    return make


def crowd(max_tokens: int = 100) -> list[dict[str, Any]]:
    """24 greedy requests with prompts of 1 to 90 printable bytes, half of them with a beginning in common."""
    choices = random.Random(3)
    shared = [choices.randrange(33, 127) for _ in range(50)]
    prompts = [
        (shared if number % 2 else []) + [choices.randrange(33, 127) for _ in range(choices.choice([1, 2, 15, 16, 40]))]
        for number in range(24)
    ]
    return [
        {
            "token_ids": {"ids": prompt},
            "sampling": {"temperature": 0},
            "stopping": {"max_tokens": max_tokens - number % 3 * 30, "ignore_eos": number % 4 > 0},
            "output": {"token_ids": True},
        }
        for number, prompt in enumerate(prompts)
    ]


def expect_exact_crowd(client: ReflectionClient, oracle: Oracle) -> None:
    """The crowd is served with preemptions and prefixes from the cache, and what it is told is exact."""
    requests = crowd()
    answers = asyncio.run(generate_all(client, requests))
    for fields, answer in zip(requests, answers, strict=True):
        expect_complete(answer, fields, oracle.eos_token_ids)
        assert answer.text == oracle.text(fields["token_ids"]["ids"], answer.token_ids)
    verdict = oracle.judge_all(requests, answers)
    load = client.load()
    print(f"{verdict.num_tokens} tokens, {verdict.num_decisive} decisive, {load.preemptions_total} preemptions")
    verdict.expect_exact(decisive=0.98)
    assert load.preemptions_total > 0
    assert any(answer.prompt.cached for answer in answers)
    # Whoever says always the same has no positions and no attention to get wrong.
    assert sum(len(set(answer.token_ids)) > 5 for answer in answers) > len(answers) / 2


@pytest.mark.parametrize("name", SUPPORTED)
def test_another_family_is_exact(
    start_server: Callable[..., Server], model_dir: Callable[[str], Path], name: str
) -> None:
    """A family that nobody wrote code for is served from its directory, exactly, under its name; a model without a chat
    template answers FAILED_PRECONDITION to chat, and goes on.
    """
    directory = model_dir(name)
    server = start_server(model=directory, **FLAGS)
    with ReflectionClient(server.address) as client:
        info = client.call("InfoService/GetModelInfo")
        assert info.model_type == SUPPORTED[name].model_type
        assert info.model == directory.name
        assert (info.vocab_size, list(info.eos_token_ids), info.dtype) == (300, [END], "float32")
        assert info.limits.max_model_len == MAX_MODEL_LEN
        assert not info.capabilities.chat
        expect_exact_crowd(client, Oracle(directory))
        refused = client.generate(chat={"messages": [{"role": "user", "content": "Hello"}]})
        refused.expect(grpc.StatusCode.FAILED_PRECONDITION)
        assert client.generate(text="Hello", stopping={"max_tokens": 3, "ignore_eos": True}).expect_ok()


def test_the_reference_backend_is_exact(start_server: Callable[..., Server], model_dir: Callable[[str], Path]) -> None:
    """The slow attention that tests measure the others by passes their test, through the whole service."""
    directory = model_dir("qwen2")
    server = start_server(model=directory, attention_backend="reference", **FLAGS)
    with ReflectionClient(server.address) as client:
        assert client.call("InfoService/GetServerInfo").engines[0].attention_backend == "reference"
        expect_exact_crowd(client, Oracle(directory))


def test_bfloat16_changes_no_token_once_it_is_out(
    start_server: Callable[..., Server], model_dir: Callable[[str], Path]
) -> None:
    """In bfloat16 a request repeated alone gives the same tokens; in a crowd with preemptions each stream has all its
    tokens and their text, and resumed with them it goes on to the same number.
    """
    directory = model_dir("qwen2-tied")
    oracle = Oracle(directory)
    server = start_server(model=directory, dtype="bfloat16", **FLAGS)
    with ReflectionClient(server.address) as client:
        assert client.call("InfoService/GetModelInfo").dtype == "bfloat16"
        requests = crowd()
        for fields in requests[:4]:
            repeated = [client.generate(**fields, cache={"bypass": True}).expect_ok() for _ in range(3)]
            assert len({tuple(answer.token_ids) for answer in repeated}) == 1
        answers = asyncio.run(generate_all(client, requests))
        assert client.load().preemptions_total > 0
        for fields, answer in zip(requests, answers, strict=True):
            expect_complete(answer, fields, oracle.eos_token_ids)
            assert answer.text == oracle.text(fields["token_ids"]["ids"], answer.token_ids)
        cut = 5
        longer = [pair for pair in zip(requests, answers, strict=True) if len(pair[1].token_ids) > cut]
        resumed = [fields | {"resume_token_ids": answer.token_ids[:cut]} for fields, answer in longer]
        for fields, answer in zip(resumed, asyncio.run(generate_all(client, resumed)), strict=True):
            expect_complete(answer, fields, oracle.eos_token_ids, num_resumed=cut)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def config_dir(tmp_path: Path) -> Callable[[PreTrainedConfig], Path]:
    """A model's directory without weights: who refuses by the configuration does not get as far as to miss them."""

    def make(config: PreTrainedConfig) -> Path:
        config.save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_family_is_refused_by_name(config_dir: Callable[[PreTrainedConfig], Path], name: str) -> None:
    """What the engine cannot run exactly ends the start with exit code 2, one line that names the family and the
    reason, no traceback, and no process left.
    """
    config, words = REFUSED[name]
    server = Server(model=config_dir(config), **FLAGS).spawn()
    try:
        assert server.wait(LIMIT_S) == 2, server.raw_stderr
        (record,) = [record for record in server.logs if record["level"] in ("error", "critical")]
        assert record["event"] == "configuration error"
        for word in words:
            assert word in record["reason"]
        assert "\n" not in record["reason"]
        assert "Traceback" not in server.raw_stderr
        assert not server.fatal_errors
        assert all(json.loads(line) for line in server.raw_stderr.splitlines())
        assert server.leftovers() == []
    finally:
        server.kill()


def test_a_window_that_no_sequence_outgrows_is_no_reason(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """A model with a sliding window is served, exactly, where --max-model-len keeps its sequences within it."""
    directory = save_model(MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=200), tmp_path)
    server = start_server(model=directory, max_model_len=200, **FLAGS)
    with ReflectionClient(server.address) as client:
        expect_exact_crowd(client, Oracle(directory))
