"""The rpc bodies; nothing else.

What lives here: the walk of one call through the parts, and the messages it sends. What must not: status codes
(`status.py` maps what is raised here), validation (`convert.py`), counting (`admission.py`).

A call leaves by raising or by returning, and whatever it holds (its place, its stream in the engine) is given back by
context managers on the way, so a cancelled call, one past its deadline and one cut by a stop string all end in the same
Abort. `CancelledError` passes through: swallowing it would leak the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from emberline.v1 import inference_pb2, info_pb2, tokenizer_pb2
from scheduler import logs
from scheduler.messages import FinishReason, SequenceOutput, Submit, TokenLogprobs
from service import convert
from service.admission import Admission, Ticket
from service.config import ServerConfig
from service.dispatch import Dispatcher
from service.errors import (
    CallError,
    DrainingError,
    EngineDeadError,
    EngineStartingError,
    QueueFullError,
)
from service.journal import Journal
from service.replica import Replica
from service.request import GenerateRequest, Limits
from service.sequence_text import SequenceText
from service.supervisor import Supervisor
from service.tokenizer import Tokenizer
from service.workers import Workers

_Context = grpc.aio.ServicerContext[Any, Any]
_Deltas = AsyncGenerator[inference_pb2.GenerateResponse, None]

VERSION = importlib.metadata.version("emberline-server")
"""Read once: it lies in a file."""
OPTIONS_ON_LOOP_MAX = 2048
"""Entries of options as long as a vocabulary that are checked on the loop (some milliseconds); more are, off it."""
NEVER_RUN_NOTES = {"flash": "this backend has never run on a GPU: it is tested against a stand-in only"}
"""What an operator should know of an attention backend."""
_QUIET_ERRORS = (DrainingError, EngineDeadError, EngineStartingError, QueueFullError)
"""These come in crowds, and the crowd's cause has a record of its own: one line for each would be a flood."""


@dataclass(slots=True)
class Backend:
    """The parts that the rpc bodies work with. `tokenizer` and `limits` come with time."""

    config: ServerConfig
    admission: Admission
    journal: Journal
    supervisor: Supervisor
    dispatcher: Dispatcher
    prompt_workers: Workers
    """For the prompts of Generate and Complete, so that a long one stalls nobody's tokens."""
    tool_workers: Workers
    """For Tokenize and Detokenize, so that these keep no prompt waiting."""
    clock: Callable[[], float] = time.monotonic
    tokenizer: Tokenizer | None = None
    limits: Limits | None = None
    """Before an engine was ready: what is known without one."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the tokenizer's, those that the model has."""

    def is_replayed(self, request: GenerateRequest) -> bool:
        """Whether the request's stream goes on after its engine's death."""
        if request.resume_on_engine_death is not None:
            return request.resume_on_engine_death
        return self.config.on_engine_death == "replay"

    def served(self) -> tuple[Tokenizer, Limits]:
        """What calls need besides an engine. Raises EngineStartingError."""
        if self.tokenizer is None or self.limits is None:
            raise EngineStartingError(self.supervisor.expected_serving_s())
        return self.tokenizer, self.limits


@dataclass(slots=True)
class _Account:
    """What the one line of a finished request tells."""

    label: str = ""
    started_s: float = 0.0
    submitted_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    num_output_tokens: int = 0
    finish: str | None = None


@dataclass(slots=True)
class _Sequence:
    """One sequence of a call: its text, and its tokens so far."""

    text: SequenceText
    is_finished: bool = False


@dataclass(slots=True)
class _Call:
    """One request after tokenization."""

    request: GenerateRequest
    submit: Submit
    sequences: list[_Sequence]
    account: _Account
    is_first: bool = True

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def delta(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        reason: FinishReason | None,
    ) -> inference_pb2.GenerateResponse | None:
        """The message for some new tokens of one sequence, or None if there is nothing to say yet."""
        sequence = self.sequences[index]
        pushed = sequence.text.push(token_ids, reason)
        kept = token_ids[: pushed.num_kept_tokens]
        self.account.num_output_tokens += len(kept)
        message = inference_pb2.GenerateResponse(
            request_id=self.account.label,
            index=index,
            text=pushed.text if self.request.output.text else "",
            tokens=convert.tokens(self.request, kept, logprobs[: len(kept)] if logprobs is not None else None),
        )
        if pushed.finish_reason is not None:
            output = kept or self.submit.resume_token_ids
            self._finish(message, sequence, pushed.finish_reason, pushed.matched_stop, output[-1] if output else None)
        elif not message.text and not message.tokens:
            return None
        self._introduce(message)
        return message

    def over_before_it_began(self) -> inference_pb2.GenerateResponse | None:
        """The only message of a call whose resumed tokens hold a stop string, else None. Of every other end that they
        had reached the engine tells.
        """
        resumed = self.sequences[0].text.resumed
        if resumed is None or resumed.finish_reason is None:
            return None
        message = inference_pb2.GenerateResponse(request_id=self.account.label)
        self._finish(message, self.sequences[0], resumed.finish_reason, resumed.matched_stop, None)
        self._introduce(message)
        return message

    def _finish(
        self,
        message: inference_pb2.GenerateResponse,
        sequence: _Sequence,
        reason: FinishReason,
        matched: str | None,
        last_token_id: int | None,
    ) -> None:
        by_token = reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        finish = convert.finish(reason, matched=matched, matched_token_id=last_token_id if by_token else None)
        message.finish.CopyFrom(finish)
        sequence.is_finished = True
        self.account.finish = reason.name
        if self.is_finished:
            account = self.account
            message.usage.prompt = account.num_prompt_tokens
            message.usage.completion = account.num_output_tokens
            message.usage.cached = account.num_cached_tokens

    def _introduce(self, message: inference_pb2.GenerateResponse) -> None:
        if self.is_first:
            self.is_first = False
            message.prompt.count = self.account.num_prompt_tokens
            message.prompt.cached = self.account.num_cached_tokens
            message.prompt.seed = self.submit.sampling.seed


class InferenceServicer:
    """Generate and Complete."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(  # noqa: N802 - the protocol's name
        self, message: inference_pb2.GenerateRequest, _context: _Context
    ) -> _Deltas:
        """Stream the deltas. What arrives while one is being written goes out together in the next."""
        backend = self._backend
        backend.admission.check_open()
        tokenizer, limits = backend.served()
        request = await self._convert(message, tokenizer, limits)
        account = _Account(request.request_id or uuid.uuid4().hex, backend.clock())
        with _one_line(account, backend.clock), backend.admission.admit(account.label) as ticket:
            ticket.add_tokens(convert.num_option_entries(message))
            call = await self._prepare(request, tokenizer, limits, account, ticket)
            only = call.over_before_it_began()
            if only is not None:
                yield only
                return
            account.submitted_s = backend.clock()
            with backend.dispatcher.open(
                call.submit, label=account.label, is_replayed=backend.is_replayed(request)
            ) as stream:
                is_over = False
                while not is_over:
                    outputs = await stream.next()
                    ticket.started()
                    if account.first_token_s is None:
                        account.first_token_s = backend.clock()
                    account.num_cached_tokens = stream.entry.num_cached_tokens
                    deltas = list(_assemble(call, outputs))
                    is_over = call.is_finished
                    if is_over:
                        # Nothing is needed of the engine any more, however slowly the rest is read.
                        stream.close(is_done=True)
                    for delta in deltas:
                        yield delta

    async def Complete(  # noqa: N802 - the protocol's name
        self, message: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.CompleteResponse:
        """Fold the deltas of Generate into one answer."""
        response = inference_pb2.CompleteResponse()
        texts: dict[int, list[str]] = {}
        completions: dict[int, inference_pb2.Completion] = {}
        async with contextlib.aclosing(self.Generate(message, context)) as deltas:
            async for delta in deltas:
                response.request_id = delta.request_id
                completion = completions.setdefault(delta.index, inference_pb2.Completion(index=delta.index))
                texts.setdefault(delta.index, []).append(delta.text)
                completion.tokens.extend(delta.tokens)
                for name in ("prompt", "usage"):
                    if delta.HasField(name):
                        getattr(response, name).CopyFrom(getattr(delta, name))
                if delta.HasField("finish"):
                    completion.finish.CopyFrom(delta.finish)
        for index, completion in sorted(completions.items()):
            completion.text = "".join(texts[index])
            response.completions.append(completion)
        return response

    async def _convert(
        self, message: inference_pb2.GenerateRequest, tokenizer: Tokenizer, limits: Limits
    ) -> GenerateRequest:
        """Check every field; on the loop, unless that would hold it up."""

        def check() -> GenerateRequest:
            return convert.generate_request(
                message,
                served_model_name=self._backend.config.served_model_name,
                limits=limits,
                defaults=tokenizer.sampling_defaults,
                draw_seed=lambda: secrets.randbits(64),
            )

        if convert.num_option_entries(message) <= OPTIONS_ON_LOOP_MAX:
            return check()
        return await self._backend.prompt_workers.run(check)

    async def _prepare(
        self, request: GenerateRequest, tokenizer: Tokenizer, limits: Limits, account: _Account, ticket: Ticket
    ) -> _Call:
        """Tokenize and settle the rest; nothing has been sent to an engine."""
        request_id = self._backend.journal.next_request_id()

        def prepare() -> _Call:
            submit = convert.to_submit(
                request,
                engine_request_id=request_id,
                prompt_token_ids=tokenizer.encode(request.prompt),
                eos_token_ids=self._backend.eos_token_ids,
                limits=limits,
            )
            sequences = [
                _Sequence(
                    SequenceText(
                        tokenizer,
                        submit.prompt_token_ids,
                        submit.resume_token_ids,
                        stop_strings=request.stop_strings,
                        include_stop=request.include_stop,
                        min_tokens=request.min_tokens,
                        skip_special_tokens=request.output.skip_special_tokens,
                    )
                )
                for _ in range(submit.num_sequences)
            ]
            return _Call(request, submit, sequences, account)

        call = await self._backend.prompt_workers.run(prepare)
        account.num_prompt_tokens = len(call.submit.prompt_token_ids)
        account.num_resumed_tokens = len(call.submit.resume_token_ids)
        ticket.add_tokens(account.num_prompt_tokens + account.num_resumed_tokens)
        return call


def _assemble(call: _Call, outputs: Sequence[SequenceOutput]) -> Iterator[inference_pb2.GenerateResponse]:
    """One message per sequence for all that has come."""
    by_index: dict[int, list[SequenceOutput]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    for index, parts in by_index.items():
        if call.sequences[index].is_finished:
            continue  # the engine ran past a stop string
        token_ids = [token_id for part in parts for token_id in part.new_token_ids]
        logprobs = None
        if parts[0].logprobs is not None:
            logprobs = [value for part in parts for value in part.logprobs or ()]
        delta = call.delta(index, token_ids, logprobs, parts[-1].finish_reason)
        if delta is not None:
            yield delta


@contextlib.contextmanager
def _one_line(account: _Account, clock: Callable[[], float]) -> Iterator[None]:
    """Log the request's one line, however it ends. No text of the user is in it, apart from the label."""
    outcome: dict[str, Any] = {}
    log = logs.get_logger().info
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        outcome = {"error": "Cancelled"}
        raise
    except CallError as error:
        outcome = {"error": type(error).__name__.removesuffix("Error")}
        if isinstance(error, _QUIET_ERRORS):
            log = logs.get_logger().debug
        raise
    except Exception:
        outcome = {"error": "Internal"}
        raise
    finally:

        def ms(until_s: float | None) -> float | None:
            return None if until_s is None else round((until_s - account.started_s) * 1000, 1)

        log(
            "request finished",
            request_id=account.label,
            finish=account.finish,
            **outcome,
            num_prompt_tokens=account.num_prompt_tokens,
            num_cached_tokens=account.num_cached_tokens,
            num_resumed_tokens=account.num_resumed_tokens,
            num_output_tokens=account.num_output_tokens,
            submitted_ms=ms(account.submitted_s),
            first_token_ms=ms(account.first_token_s),
            total_ms=ms(clock()),
        )


class TokenizerServicer:
    """Tokenize and Detokenize; an engine is not needed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Tokenize(  # noqa: N802 - the protocol's name
        self, message: tokenizer_pb2.TokenizeRequest, _context: _Context
    ) -> tokenizer_pb2.TokenizeResponse:
        """What Generate would be given for the same input."""
        backend = self._backend
        tokenizer, limits = backend.served()
        request = convert.tokenize_request(message, served_model_name=backend.config.served_model_name, limits=limits)

        def encode() -> tokenizer_pb2.TokenizeResponse:
            ids = tokenizer.encode(request.prompt)
            return tokenizer_pb2.TokenizeResponse(
                ids=ids,
                pieces=tokenizer.pieces(ids) if request.with_pieces else (),
                max_prompt_tokens=limits.max_prompt_tokens,
            )

        return await backend.tool_workers.run(encode)

    async def Detokenize(  # noqa: N802 - the protocol's name
        self, message: tokenizer_pb2.DetokenizeRequest, _context: _Context
    ) -> tokenizer_pb2.DetokenizeResponse:
        """The text of the tokens."""
        backend = self._backend
        tokenizer, limits = backend.served()
        request = convert.detokenize_request(message, served_model_name=backend.config.served_model_name, limits=limits)

        def decode() -> tokenizer_pb2.DetokenizeResponse:
            text = tokenizer.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
            return tokenizer_pb2.DetokenizeResponse(text=text)

        return await backend.tool_workers.run(decode)


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
            ),
            sampling_defaults=info_pb2.SamplingDefaults(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            ),
            capabilities=info_pb2.Capabilities(chat=tokenizer.has_chat_template, resume_on_engine_death=True),
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
        """As of the last step; those that are still being tokenized wait, too."""
        backend = self.backend
        stats = [replica.stats for replica in backend.supervisor.replicas]
        num_before_engine = backend.admission.num_live - len(backend.journal) + backend.dispatcher.num_waiting
        return info_pb2.GetLoadResponse(
            running=sum(one.num_running for one in stats),
            waiting=sum(one.num_waiting for one in stats) + num_before_engine,
            waiting_tokens=sum(one.num_waiting_tokens for one in stats),
            kv_blocks_used=sum(one.num_used_kv_blocks for one in stats),
            kv_blocks_total=sum(one.num_kv_blocks for one in stats),
            preemptions_total=sum(one.num_preemptions_total for one in stats),
        )


def _engine_info(replica: Replica) -> info_pb2.EngineInfo:
    info = info_pb2.EngineInfo(
        index=replica.index,
        state=replica.state.value,  # type: ignore[arg-type] # the numbers are the same
        pid=replica.pid,
    )
    ready = replica.ready if replica.is_serving else None
    if ready is not None:
        info.device = ready.device
        info.attention_backend = ready.attention_backend
        info.attention_backend_note = NEVER_RUN_NOTES.get(ready.attention_backend, "")
        info.block_size = ready.block_size
        info.num_kv_blocks = ready.num_kv_blocks
        info.startup.FromMilliseconds(int(ready.startup_s * 1000))
    return info
