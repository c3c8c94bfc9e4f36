"""What this server is, serves and is busy with.

What lives here: the bodies of InfoService, all answered from memory. What must not: anything that queues.
"""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from emberline.v1 import info_pb2
from service import convert
from service.backend import Backend
from service.errors import EngineStartingError
from service.replica import Replica

_Context = grpc.aio.ServicerContext[Any, Any]

VERSION = importlib.metadata.version("emberline-server")
"""Read once: it lies in a file."""
NEVER_RUN_NOTES = {"flash": "this backend has never run on a GPU: it is tested against a stand-in only"}
"""What an operator should know of an attention backend."""


@dataclass(slots=True)
class InfoServicer:
    """What this server is, serves and is busy with; from memory."""

    backend: Backend
    start_time_s: float = field(default_factory=time.time)
    """Wall clock; for callers' eyes only."""
    start_monotonic_s: float = field(default_factory=time.monotonic)

    async def GetModelInfo(  # noqa: N802 - the protocol's name
        self, message: info_pb2.GetModelInfoRequest, _context: _Context
    ) -> info_pb2.GetModelInfoResponse:
        """Limits and effective defaults; they outlive the engine that told them."""
        backend = self.backend
        convert.check_model(message.model, backend.config.served_model_name)
        ready = backend.supervisor.ready
        tokenizer, limits = backend.served()
        if ready is None:
            raise EngineStartingError(backend.supervisor.expected_serving_s())
        defaults = tokenizer.sampling_defaults
        return info_pb2.GetModelInfoResponse(
            model=backend.config.served_model_name,
            model_type=ready.model_type,
            num_parameters=ready.num_parameters,
            vocab_size=ready.vocab_size,
            eos_token_ids=backend.eos_token_ids,
            limits=info_pb2.Limits(
                max_model_len=limits.max_model_len,
                max_prompt_tokens=limits.max_prompt_tokens,
                max_output_tokens=limits.max_output_tokens,
                max_logprobs=limits.max_logprobs,
                max_stop_strings=limits.max_stop_strings,
                max_stop_string_bytes=limits.max_stop_string_bytes,
                max_stop_token_ids=limits.max_stop_token_ids,
                max_request_bytes=limits.max_request_bytes,
                max_chat_messages=limits.max_chat_messages,
                max_guide_bytes=limits.max_guide_bytes,
                max_guide_choices=limits.max_guide_choices,
                max_sequences=limits.max_sequences,
                max_prompt_logprob_entries=limits.max_prompt_logprob_entries,
            ),
            sampling_defaults=info_pb2.SamplingDefaults(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
            capabilities=info_pb2.Capabilities(
                chat=tokenizer.has_chat_template,
                guided=bool(backend.eos_token_ids),
                multiple_sequences=limits.max_sequences > 1,
                prompt_logprobs=True,
                resume_on_engine_death=True,
                time_limits=True,
                stream_interval=True,
            ),
            dtype=ready.dtype,
        )

    async def GetServerInfo(  # noqa: N802 - the protocol's name
        self, _message: info_pb2.GetServerInfoRequest, _context: _Context
    ) -> info_pb2.GetServerInfoResponse:
        """Version, and the engine's state."""
        response = info_pb2.GetServerInfoResponse(version=VERSION)
        response.start_time.FromMilliseconds(int(self.start_time_s * 1000))
        response.uptime.FromMilliseconds(int((time.monotonic() - self.start_monotonic_s) * 1000))
        response.engines.extend(_engine_info(replica) for replica in self.backend.supervisor.replicas)
        return response

    async def GetLoad(  # noqa: N802 - the protocol's name
        self, _message: info_pb2.GetLoadRequest, _context: _Context
    ) -> info_pb2.GetLoadResponse:
        """As of the last step; what no engine has been given yet waits, too: it is being tokenized, or an engine is
        missing. An answer that is all there and still being read is a live call and nothing else.
        """
        backend = self.backend
        serving = [replica for replica in backend.supervisor.replicas if replica.is_serving]
        stats = [replica.stats for replica in serving]
        num_before_engine = backend.admission.num_preparing + backend.dispatcher.num_waiting
        return info_pb2.GetLoadResponse(
            running=sum(one.num_running for one in stats),
            waiting=sum(one.num_waiting for one in stats) + num_before_engine,
            waiting_tokens=sum(one.num_waiting_tokens for one in stats),
            kv_blocks_used=sum(one.num_used_kv_blocks for one in stats),
            kv_blocks_total=sum(replica.ready.num_kv_blocks for replica in serving if replica.ready is not None),
            preemptions_total=sum(one.num_preemptions_total for one in stats),
            generated_tokens_total=backend.totals.num_generated_tokens,
            live_calls=backend.totals.num_live_calls,
        )


def _engine_info(replica: Replica) -> info_pb2.EngineInfo:
    info = info_pb2.EngineInfo(
        index=replica.index,
        state=replica.state.value,  # type: ignore[arg-type] # the numbers are the same
        pid=replica.pid,
        deaths=replica.num_deaths,
        last_death_id=replica.last_death_id,
    )
    if replica.is_serving:
        assert replica.ready is not None
        assert replica.engine is not None
        ready, client, stats = replica.ready, replica.engine.client, replica.stats
        info.device = ready.device
        info.attention_backend = ready.attention_backend
        info.attention_backend_note = NEVER_RUN_NOTES.get(ready.attention_backend, "")
        info.block_size = ready.block_size
        info.num_kv_blocks = ready.num_kv_blocks
        info.startup.FromMilliseconds(int(ready.startup_s * 1000))
        info.load.running = stats.num_running
        info.load.waiting = stats.num_waiting
        info.load.kv_blocks_used = stats.num_used_kv_blocks
        info.load.streams = client.num_streams
        info.load.generated_tokens_total = client.num_generated_tokens
        info.load.step.FromMicroseconds(int(client.last_step_s * 1_000_000))
        info.load.SetInParent()  # an idle engine's is there, too
    return info
