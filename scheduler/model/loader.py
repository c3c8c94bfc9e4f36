"""From a directory or hub name to a model that is ready for the runner, or one clear sentence why not.

What must live here: everything that asks transformers for files, and the translation of its errors. What must not:
KV pools, steps, the judgement of families (`families.py`, `probe.py`).

Two steps, because a standby for a GPU may do the first but not the second: `load_weights` reads files into host memory
and touches no GPU, `examine` moves the model to its device and runs it once. On a CPU, weights whose files have the
dtype that is served (safetensors) are not copied at all: transformers leaves them mapped from the file, privately, so
that engines share the pages and nothing that is written to a tensor could reach the file. Layers that are fused later
(`fuse.py`) have packed copies of their own and let go of those pages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from scheduler.config import DEVICES, DTYPES, EngineConfig
from scheduler.errors import ConfigurationError, StartupError
from scheduler.model.families import effective_max_model_len, refuse_unsupported, unsupported
from scheduler.model.paged_attention import PROBING
from scheduler.model.probe import AttentionShape, probe_attention


@dataclass(frozen=True, slots=True)
class HostModel:
    """A model whose weights are in host memory, not yet on its device."""

    model: Any
    """A transformers causal language model in eval mode."""
    config: PreTrainedConfig
    max_model_len: int
    """The model's own limit or the flag's, whichever is less; the KV pool may lower it further."""
    device_type: str
    """`cpu` or `cuda`: where it is to serve."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, examined, with its attention still unattached."""

    model: Any
    """A transformers causal language model in eval mode."""
    model_type: str
    attention: AttentionShape
    num_parameters: int
    vocab_size: int
    """Rows of the vocabulary projection."""
    max_model_len: int
    """The model's own limit or the flag's, whichever is less; the KV pool may lower it further."""
    dtype: torch.dtype
    device: torch.device


def use_threads(num_threads: int | None) -> int:
    """Sets and returns the number of compute threads; None: as many as this process may use cores."""
    num_threads = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    return num_threads


def load_weights(engine_config: EngineConfig) -> HostModel:
    """Reads the model into host memory, and judges its configuration first.

    Raises ConfigurationError for flags that do not fit it, ModelUnsupportedError for a family that the engine cannot
    run exactly, StartupError where its files are missing or broken.
    """
    # Its progress bars and advice would go to stderr past the one writer of it.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    device_type = resolve_device_type(engine_config.device)
    config = _load_config(engine_config)
    refuse_unsupported(config, engine_config.max_model_len)
    max_model_len = effective_max_model_len(config, engine_config.max_model_len)
    return HostModel(_load_model(engine_config, config, device_type), config, max_model_len, device_type)


def examine(host_model: HostModel, device_index: int | None) -> LoadedModel:
    """Moves the model to its device and runs it once, to learn what it needs.

    Raises ConfigurationError if there is no such device, StartupError if it is too small, ModelUnsupportedError for a
    model that the engine cannot run exactly.
    """
    device = resolve_device(host_model.device_type, device_index)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of other packages launch on the current device
    try:
        model = host_model.model.to(device)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the model does not fit into the memory of {device}: {_first_line(error)}") from None
    return LoadedModel(
        model=model,
        model_type=host_model.config.model_type,
        attention=probe_attention(model, host_model.max_model_len),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=_vocab_size(model),
        max_model_len=host_model.max_model_len,
        dtype=model.dtype,
        device=device,
    )


def resolve_device_type(name: str) -> str:
    """`cpu` or `cuda`; `auto` is the GPU where there is one. Asks the driver for GPUs, but touches none.

    Raises ConfigurationError for a device that is not there.
    """
    assert name in DEVICES, name
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device cuda was asked for, but torch finds no GPU")
    return name


def resolve_device(device_type: str, device_index: int | None) -> torch.device:
    """Always a definite GPU, the first one if `device_index` is None; it means nothing on a CPU.

    Raises ConfigurationError if there are not so many.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    index = device_index or 0
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigurationError(f"GPU {index} was asked for, but torch finds {torch.cuda.device_count()}")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device_type: str, own: object) -> torch.dtype:
    """`auto` is float32 on a CPU, where 16 bits are slow; on a GPU, whose kernels know 16 bits only, the checkpoint's
    own type if it has 16 bits, else bfloat16. `own`: what the checkpoint's configuration says, if anything.
    """
    if name == "auto":
        if device_type == "cpu":
            return torch.float32
        return torch.float16 if own == torch.float16 else torch.bfloat16
    assert name in DTYPES, name
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _load_config(engine_config: EngineConfig) -> PreTrainedConfig:
    name = engine_config.model
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise StartupError(f"model directory {name} has no config.json")
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise StartupError(f"model directory {name} does not exist")
    try:
        return AutoConfig.from_pretrained(
            name, revision=engine_config.revision, trust_remote_code=engine_config.trust_remote_code
        )
    except ValueError as error:
        if "trust_remote_code" in str(error) and not engine_config.trust_remote_code:
            raise ConfigurationError(
                f"model {name} comes with code of its own; it runs only with --trust-remote-code"
            ) from None
        raise ConfigurationError(f"model {name} cannot be used: {_first_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - files and hubs fail in many ways; all mean: no model
        raise StartupError(f"model {name} cannot be read: {_first_line(error)}") from None


def _load_model(engine_config: EngineConfig, config: PreTrainedConfig, device_type: str) -> Any:
    auto_model: Any = AutoModelForCausalLM  # its annotations know nothing of output_loading_info
    try:
        model, loading = auto_model.from_pretrained(
            engine_config.model,
            config=config,
            revision=engine_config.revision,
            trust_remote_code=engine_config.trust_remote_code,
            dtype=resolve_dtype(engine_config.dtype, device_type, config.get_text_config().dtype),
            attn_implementation=PROBING,
            output_loading_info=True,
        )
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001 - files, hubs and models' own code fail in many ways
        if PROBING in str(error):
            raise unsupported(config, "its attention does not go through transformers' attention interface") from None
        raise StartupError(f"model {engine_config.model} cannot be loaded: {_first_line(error)}") from None
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers would have made them up
        raise StartupError(
            f"model {engine_config.model} lacks {len(missing)} of its weights; the first one missing is {missing[0]}"
        )
    return model.eval().requires_grad_(False)


def _vocab_size(model: Any) -> int:
    """Rows of the vocabulary projection; each must have an embedding, for what is sampled is read in the next step."""
    num_read = int(model.get_input_embeddings().weight.shape[0])
    head = model.get_output_embeddings()
    num_written = num_read if head is None else int(head.weight.shape[0])
    if num_written > num_read:
        raise unsupported(model.config, f"it can say {num_written} tokens but read only {num_read}")
    return num_written


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
