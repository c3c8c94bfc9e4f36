"""What an engine is told at its start. Checked by the front end (`service/config.py`); plain values only."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one engine process needs to load a model and serve it."""

    model: str
    """A directory or a hub name that transformers can load."""
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    """One of `DTYPES`. `auto` is float32 on a CPU; on a GPU the checkpoint's own if it
    has 16 bits, else bfloat16."""
    device: str = "auto"
    """One of `DEVICES`."""
    attention_backend: str = "auto"
    """A name in `scheduler/model/attention/registry.py`, or `auto`."""
    num_threads: int | None = None
    """Compute threads; None: one per core this process may use."""
    max_model_len: int | None = None
    """None: the model's own limit."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int | None = None
    """None: the attention backend's choice."""
    num_kv_blocks: int | None = None
    """None: as many as `kv_cache_memory`, or the measured free memory, allows."""
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory the engine may use in all, in (0, 1]."""
    device_index: int | None = None
    """Which GPU, where there are several; None: the first."""
    standby: bool = False
    """Load what may be held beside a serving engine, say `StandingBy`, and wait for `Activate`. On a GPU that is no
    device memory; on a CPU everything but the KV pool."""
