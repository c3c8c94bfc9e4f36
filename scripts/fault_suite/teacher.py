"""transformers' word on greedy streams: `python -m scripts.fault_suite.teacher MODEL_DIRECTORY TIE < jobs > verdicts`.

A process of its own, so that the suite need not hold a model. One teacher-forced pass per stream: where the two best
logits differ by more than TIE only the best token is right; elsewhere one within TIE of the best.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main(directory: str, tie: float) -> None:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    model.eval()
    jobs = json.load(sys.stdin)
    json.dump([judge(model, job["prompt_ids"], job["output_ids"], tie) for job in jobs], sys.stdout)


def judge(model: Any, prompt_ids: list[int], output_ids: list[int], tie: float) -> str:
    """Empty if every output token may be what greedy decoding says; else what is wrong with the first that may not."""
    if not output_ids:
        return ""
    row = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
    with torch.inference_mode():
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(output_ids)).logits[0]
    best, best_ids = logits.topk(2)
    for position, token_id in enumerate(output_ids):
        first, second = best[position].tolist()
        emitted = float(logits[position, token_id])
        if emitted < first and (first - second > tie or emitted < first - tie):
            return (
                f"token {position} is {token_id} with {emitted:.5f}, the best is {int(best_ids[position, 0])} with "
                f"{first:.5f}"
            )
    return ""


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
