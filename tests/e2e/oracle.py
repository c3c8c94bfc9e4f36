"""transformers' own word on what a server should have said: one teacher-forced pass per answer.

Nothing of the product is imported here. The rules of `SamplingOptions` are written a second time, slowly, one row and
one token at a time; a request's own fields tell which of them apply, so that a test says them once.

    verdict = Oracle(directory).judge(prompt_ids, answer.token_ids, {"sampling": {"temperature": 0}})
    verdict.expect_exact()
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tokenizers
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.e2e.harness import Generation, ReflectionClient, default_model_dir

TIE = 1e-3
"""Logits closer than this may change places with the shape of the batch: the design's bound for "exact"."""
MASS_TIE = 1e-4
"""The same for a sum of probabilities, at the edge of a nucleus."""
NUM_THREADS = 1
"""Of one pass. More would spin at barriers for a core that somebody else has, and take ten times as long."""

Fields = Mapping[str, Any]

transformers_logging.disable_progress_bar()


@dataclass
class Verdict:
    """What the oracle says of one answer, or of several together."""

    num_tokens: int = 0
    num_decisive: int = 0
    """Positions where the two best candidates are not tied: there only one token is right."""
    faults: list[str] = field(default_factory=list)

    def __iadd__(self, other: Verdict) -> Self:
        self.num_tokens += other.num_tokens
        self.num_decisive += other.num_decisive
        self.faults += other.faults
        return self

    def expect_exact(self, decisive: float = 0.9) -> None:
        """No fault; and so few ties that this says something: at least this share of the positions are decisive."""
        assert not self.faults, f"{len(self.faults)} of {self.num_tokens} tokens are wrong:\n" + "\n".join(
            self.faults[:20]
        )
        assert self.num_tokens > 0
        assert self.num_decisive >= decisive * self.num_tokens, self


class Oracle:
    """One model as transformers runs it, in float32."""

    def __init__(self, directory: Path) -> None:
        with _threads(NUM_THREADS):
            self._model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            ).eval()
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        eos = json.loads((directory / "generation_config.json").read_text()).get("eos_token_id")
        self.eos_token_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> str:
        """decode(prompt ids + output ids) less decode(prompt ids). Only for prompts that end with a whole character."""
        before = self._tokenizer.decode(list(prompt_ids), skip_special_tokens=True)
        whole = self._tokenizer.decode([*prompt_ids, *output_ids], skip_special_tokens=True)
        assert whole.startswith(before)
        return whole[len(before) :]

    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Raw logits [len(output_ids), V]: row i is what output token i was chosen from. One pass."""
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        with _threads(NUM_THREADS), torch.inference_mode():
            return self._model(input_ids=ids, use_cache=False, logits_to_keep=len(output_ids)).logits[0]

    def judge(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], fields: Fields, *, num_resumed: int = 0
    ) -> Verdict:
        """Whether each token could be chosen by a request of these fields.

        Greedy: the best candidate, or one within TIE of the best where the two best are tied. Sampled: one of those
        that the filters keep. The first `num_resumed` of `output_ids` were given to the server, not made by it.
        """
        verdict = Verdict()
        logits = self.logits(prompt_ids, output_ids)
        with _threads(NUM_THREADS):
            for position in range(num_resumed, len(output_ids)):
                scores = self.scores(logits[position], prompt_ids, output_ids[:position], fields)
                verdict += _judge_token(scores, output_ids[position], position, fields["sampling"])
        return verdict

    def judge_all(self, requests: Sequence[Fields], answers: Sequence[Generation]) -> Verdict:
        """`judge` for each request that was given as token ids, on as many cores as there are."""
        verdict = Verdict()
        pairs = list(zip(requests, answers, strict=True))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for one in pool.map(
                lambda pair: self.judge(pair[0]["token_ids"]["ids"], pair[1].token_ids, pair[0]), pairs
            ):
                verdict += one
        return verdict

    def scores(
        self, logits: torch.Tensor, prompt_ids: Sequence[int], earlier_ids: Sequence[int], fields: Fields
    ) -> torch.Tensor:
        """Logits [V] after everything that comes before temperature, in the order that `SamplingOptions` promises."""
        sampling, stopping = fields.get("sampling", {}), fields.get("stopping", {})
        scores = logits.double().clone()
        allowed = sampling.get("allowed_token_ids")
        if allowed:
            kept = torch.full_like(scores, -math.inf)
            kept[allowed] = scores[allowed]
            scores = kept
        for token_id, bias in sampling.get("logit_bias", {}).items():
            scores[int(token_id)] += bias
        if len(earlier_ids) < stopping.get("min_tokens", 0):
            eos = [] if stopping.get("ignore_eos") else self.eos_token_ids
            for token_id in (*eos, *stopping.get("stop_token_ids", ())):
                scores[token_id] = -math.inf
        repetition = sampling.get("repetition_penalty", 1.0)
        if repetition != 1.0:
            for token_id in {*prompt_ids, *earlier_ids}:
                scores[token_id] *= 1 / repetition if scores[token_id] > 0 else repetition
        frequency, presence = sampling.get("frequency_penalty", 0.0), sampling.get("presence_penalty", 0.0)
        if frequency or presence:
            for token_id, count in Counter(earlier_ids).items():
                scores[token_id] -= frequency * count + presence
        return scores


def _judge_token(scores: torch.Tensor, token_id: int, position: int, sampling: Fields) -> Verdict:
    best, second = (scores.topk(2).values).tolist()
    emitted = float(scores[token_id])
    is_decisive = best - second > TIE
    temperature = sampling["temperature"]  # a test that is judged says what it wants
    if temperature == 0:
        right = emitted == best if is_decisive else emitted >= best - TIE
        why = "is not the best"
    else:
        right, why = _is_kept(scores / temperature, token_id, sampling)
    faults = []
    if not right:
        faults.append(
            f"position {position}: token {token_id} at {emitted:.5f} {why}; "
            f"the best is {int(scores.argmax())} at {best:.5f}, the next at {second:.5f}"
        )
    return Verdict(1, int(is_decisive), faults)


def _is_kept(scores: torch.Tensor, token_id: int, sampling: Fields) -> tuple[bool, str]:
    """Whether top-k, then top-p of what it leaves, then min-p could keep the token."""
    emitted = scores[token_id]
    better = scores > emitted + TIE
    top_k = sampling.get("top_k", 0) or len(scores)
    if int(better.sum()) >= top_k:
        return False, f"is not among the best {top_k}"
    probabilities = scores.topk(min(top_k, len(scores))).values.softmax(dim=-1)
    mass_before = float(probabilities[: int(better.sum())].sum())
    if mass_before >= sampling.get("top_p", 1.0) + MASS_TIE:
        return False, f"is outside the nucleus: better ones have {mass_before:.5f}"
    if float(emitted) < float(scores.max()) + math.log(sampling.get("min_p", 0.0) or 1e-300) - TIE:
        return False, "is less likely than min_p allows"
    return math.isfinite(float(emitted)), "cannot be sampled at all"


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def default_oracle() -> Oracle:
    """Of the default model; loaded once for all tests."""
    return Oracle(default_model_dir())


async def generate_all(client: ReflectionClient, requests: Sequence[Fields], **call: Any) -> list[Generation]:
    """All of them at once over one connection; each must end OK."""
    async with client.aio_channel() as channel:
        answers = await asyncio.gather(*(client.agenerate(channel, **call, **fields) for fields in requests))
    return [answer.expect_ok() for answer in answers]


def expect_complete(answer: Generation, fields: Fields, eos_token_ids: Sequence[int], num_resumed: int = 0) -> None:
    """The answer has as many tokens as its request must have, and its usage says so.

    For requests without stop strings. Ends at max_tokens, or before that with the first EOS or stop token that counts.
    """
    stopping, ids = fields["stopping"], answer.token_ids
    stops = {*stopping.get("stop_token_ids", ()), *(() if stopping.get("ignore_eos") else eos_token_ids)}
    max_tokens = stopping["max_tokens"] - num_resumed
    counting = ids[max(0, stopping.get("min_tokens", 0) - num_resumed) :]
    assert not stops & set(counting[:-1]), "it went on after a stop token"
    if counting and counting[-1] in stops:
        assert answer.finish_reason in ("EOS", "STOP_TOKEN")
        assert answer.finish.matched_token_id == ids[-1]
        assert len(ids) <= max_tokens
    else:
        assert answer.finish_reason == "MAX_TOKENS"
        assert len(ids) == max_tokens
    assert answer.usage.completion == len(ids)
    assert answer.usage.prompt == answer.prompt.count
    assert answer.usage.cached == answer.prompt.cached
    assert sum(response.HasField("usage") for response in answer.responses) == 1
    assert sum(response.HasField("prompt") for response in answer.responses) == 1
    assert answer.responses[-1].HasField("usage")
    assert answer.responses[0].HasField("prompt")


def expect_continuation(whole: Generation, num_tokens: int, rest: str) -> None:
    """`rest` is the text of `whole` that had not been sent when its first `num_tokens` tokens had: no more, no less.

    Tokens that came in one message cannot be parted; for a cut between them `rest` may begin anywhere in its text.
    """
    assert whole.text.endswith(rest)
    num_seen, before = 0, ""
    for response in whole.responses:
        after = before + response.text
        num_seen += len(response.tokens)
        if num_seen == num_tokens:
            assert after + rest == whole.text, f"cut at {num_tokens}"
            return
        if num_seen > num_tokens:
            assert len(before) <= len(whole.text) - len(rest) <= len(after), f"cut at {num_tokens}"
            return
        before = after
    raise AssertionError(f"there is no cut at {num_tokens}: {num_seen} tokens in all")
