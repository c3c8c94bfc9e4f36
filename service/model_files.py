"""The files that come with a model and that the front end reads: tokenizer, chat template, generation config.

What lives here: finding them, reading them, checking what they say. No weights are read or downloaded here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from scheduler.errors import ConfigurationError, StartupError
from service.request import INT32_MAX, SamplingDefaults

TOKENIZER_FILE = "tokenizer.json"
_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What they say."""

    tokenizer_file: Path
    chat_template: str | None
    named_tokens: Mapping[str, str]
    """Such as `eos_token` → `</s>`: what templates may refer to, and special wherever they are in the vocabulary."""
    special_tokens: tuple[str, ...]
    """Tokens that the tokenizer's config calls special, whatever tokenizer.json says of them."""
    eos_token_ids: tuple[int, ...]
    """From the generation config, else the model's; empty if neither says."""
    sampling_defaults: SamplingDefaults


def read_model_files(model: str | Path, revision: str | None = None) -> ModelFiles:
    """`model`: a directory, or a hub name. Raises StartupError and ConfigurationError."""
    directory = _directory(model, revision)
    tokenizer_file = directory / TOKENIZER_FILE
    if not tokenizer_file.is_file():
        raise StartupError(f"the model has no {TOKENIZER_FILE} (in {directory})")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    named = _named_tokens(_read_json(directory / "special_tokens_map.json")) | _named_tokens(tokenizer_config)
    generation_config = _read_json(directory / "generation_config.json")
    return ModelFiles(
        tokenizer_file=tokenizer_file,
        chat_template=_chat_template(directory, tokenizer_config),
        named_tokens=named,
        special_tokens=_special_tokens(tokenizer_config, named),
        eos_token_ids=_eos_token_ids(generation_config, _read_json(directory / "config.json")),
        sampling_defaults=_sampling_defaults(generation_config),
    )


def _directory(model: str | Path, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(huggingface_hub.snapshot_download(str(model), revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # noqa: BLE001 - the hub's client raises what its HTTP library, disk and checks raise
        reason = (str(error).splitlines() or [""])[0]
        raise StartupError(
            f"{str(model)!r} is no directory, and no such model can be fetched: {type(error).__name__}: {reason}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    """An absent file says nothing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"cannot read {path}: it holds no JSON object")
    return value


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A file of its own goes before the config's entry; of several named templates the one named `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    """A token is a string, or an object with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if text is not None}


def _special_tokens(config: Mapping[str, Any], named: Mapping[str, str]) -> tuple[str, ...]:
    flagged = (entry for entry in config.get("added_tokens_decoder", {}).values() if entry.get("special"))
    texts = (_token_text(entry) for entry in (*(config.get("additional_special_tokens") or ()), *flagged))
    return tuple(dict.fromkeys([*named.values(), *(text for text in texts if text is not None)]))


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Of the first config that has any."""
    for config in configs:
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise ConfigurationError(f"the model's eos_token_id is neither a token id nor a list of them: {value!r}")
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """`do_sample` is not looked at: a caller who wants the best token asks for temperature 0."""
    if config.get("top_k") == -1:  # what some configs write for "all"
        config = {**config, "top_k": 0}
    standard = SamplingDefaults()
    return SamplingDefaults(
        temperature=_number(config, "temperature", standard.temperature, 0.0, 100.0),
        top_p=_number(config, "top_p", standard.top_p, 1e-9, 1.0),
        top_k=int(_number(config, "top_k", standard.top_k, 0, INT32_MAX)),
        min_p=_number(config, "min_p", standard.min_p, 0.0, 1.0),
        repetition_penalty=_number(config, "repetition_penalty", standard.repetition_penalty, 0.01, 100.0),
    )


def _number(config: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or not least <= value <= most:
        raise ConfigurationError(f"generation_config.json: {name} is {value!r}, must be in [{least:g}, {most:g}]")
    return float(value)
