"""`convert_gguf.py SOURCE TARGET MADE_BY`: turns the default model's GGUF file into a directory for transformers.

Reading a GGUF through transformers takes half a minute at every start; the safetensors file made here loads in under a
second. What must hold of the result: each weight is exactly the float32 value that the GGUF's blocks stand for, and the
tokenizer is the one that the GGUF's vocabulary describes. transformers reads the same weights, bit for bit, but another
tokenizer (see `tokenizer`), so nothing of it is used here. Only the Llama architecture over byte-level BPE is
understood: this is the default model's converter, not a general one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3
"""The token type of GGUF for tokens that steer the model and are no text."""

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(source: Path, target: Path, made_by: str) -> None:
    """Converts into a directory beside `target` and renames it: whoever looks sees all of it or nothing.

    `made_by` becomes the file of that name, by which scripts/install knows its own work.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (fields["general.architecture"], fields["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise SystemExit(f"{source.name}: not a Llama model with a byte-level BPE vocabulary")

    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh.chmod(0o755)  # mkdtemp and save_file keep others out; a cache may be shared
        save_file(weights(reader, fields), fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        tokenizer(fields).save(str(fresh / "tokenizer.json"))
        write_json(fresh / "config.json", model_config(reader, fields))
        write_json(fresh / "generation_config.json", special_ids(fields))
        write_json(fresh / "tokenizer_config.json", tokenizer_config(fields))
        (fresh / "made-by").write_text(made_by, encoding="utf-8")
        if target.exists():  # made by an older converter; a server that has it open keeps its own copy of the files
            grave = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            target.rename(grave / "old")
            fresh.rename(target)
            shutil.rmtree(grave)
        else:
            fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def weights(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """The tensors under the names of transformers, shapes (out, in), float32. A tied output projection is absent."""
    num_heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        *prefix, kind, parameter = tensor.name.split(".")
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if kind in num_heads:
            values = split_rotary_pairs(values, num_heads[kind])
        layer = f"model.layers.{prefix[1]}." if prefix else ""
        tensors[f"{layer}{TENSOR_NAMES[kind]}.{parameter}"] = values
    return tensors


def split_rotary_pairs(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorders each head's rows from (x0, y0, x1, y1, …), as GGUF stores Llama, to (x0, x1, …, y0, y1, …)."""
    rows, columns = values.shape
    return np.ascontiguousarray(
        values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE after GPT-2's word pattern, each digit by itself: what `tokenizer.ggml.pre` "smollm" stands for.

    transformers' own reading of the GGUF ignores that key and lets " 3" be one piece: ids the model has never seen.
    The vocabulary lacks 21 of the 256 bytes (a few control characters; the rest cannot occur in UTF-8 or belong to
    planes that Unicode has not assigned). As in the model's original tokenizer they encode to nothing.
    """
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"unknown pre-tokenizer {fields['tokenizer.ggml.pre']!r}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    result.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return result


def special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def model_config(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # Stored as float32: the shortest decimal that means the same is the number its makers wrote.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": fields["llama.vocab_size"],
        **special_ids(fields),
    }


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json as it is; a family's class rebuilds parts of it
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
