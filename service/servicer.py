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
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc

from emberline.v1 import inference_pb2, tokenizer_pb2
from service import convert
from service.account import Account
from service.admission import Ticket
from service.answer import Answer, SequenceState
from service.backend import Backend
from service.errors import CallError
from service.request import GenerateRequest, Limits
from service.sequence_text import SequenceText
from service.stream import RequestStream
from service.time_limits import TimeLimits
from service.tokenizer import Tokenizer

_Context = grpc.aio.ServicerContext[Any, Any]
_Deltas = AsyncGenerator[inference_pb2.GenerateResponse, None]

OPTIONS_ON_LOOP_MAX = 2048
"""Entries of options as long as a vocabulary that are checked on the loop (some milliseconds); more are, off it."""
GUIDE_BYTES_PER_TOKEN = 64
"""A compiled guide waits with its request; so many bytes of it count as a token in the queue."""


class InferenceServicer:
    """Generate and Complete."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def check_room(self) -> None:
        """What can be said before a call's message is there. Raises CallError."""
        try:
            self._backend.admission.check_room()
        except CallError as error:
            self._backend.accounts.refused(error)
            raise

    async def Generate(  # noqa: N802 - the protocol's name
        self, message: inference_pb2.GenerateRequest, context: _Context, *, method: str = "Generate"
    ) -> _Deltas:
        """Stream the deltas. What arrives while one is being written goes out together in the next."""
        backend = self._backend
        arrived_s = asyncio.get_running_loop().time()
        label = convert.valid_label(message) or ""  # one that is not allowed ends the call in a moment
        with backend.accounts.open(method, label, context, is_chat=message.HasField("chat")) as account:
            backend.admission.check_open()
            tokenizer, limits = backend.served()
            with backend.admission.admit(convert.num_queue_tokens(message, limits)) as ticket:
                request = await self._convert(message, tokenizer, limits)
                time_limits = TimeLimits.from_arrival(
                    arrived_s,
                    max_queue_time_s=request.max_queue_time_s,
                    max_time_s=request.max_time_s,
                    deadline_s=context.time_remaining(),
                )
                ticket.claim(account.label)
                ticket.expect_start(request.priority, time_limits.first_step)
                async with time_limits.waiting():
                    answer = await self._prepare(request, tokenizer, limits, account, ticket)
                only = answer.over_before_it_began()
                if only is not None:
                    yield only
                    return
                ticket.check()
                with backend.dispatcher.open(
                    answer.submit,
                    label=account.label,
                    is_replayed=backend.is_replayed(request),
                    time_limits=time_limits,
                ) as stream:
                    account.timeline = stream.timeline
                    while not answer.is_finished:
                        for delta in await self._next(stream, answer, ticket):
                            yield delta

    async def _next(
        self, stream: RequestStream, answer: Answer, ticket: Ticket
    ) -> Sequence[inference_pb2.GenerateResponse]:
        """The messages for all that has come; waits for something to come."""
        outputs = await stream.next()
        if not outputs:
            return list(answer.cut())
        account = answer.account
        ticket.started()
        self._backend.accounts.has_output(account)
        account.num_cached_tokens = stream.entry.num_cached_tokens
        for output in outputs:
            if output.prompt_logprobs is not None:
                for _ in answer.take_prompt(output.prompt_logprobs):
                    await asyncio.sleep(0)  # other streams' tokens need not wait for a long prompt's
        deltas = list(answer.assemble(outputs))
        if answer.is_finished:
            # Nothing is needed of the engine any more, however slowly the rest is read.
            stream.close(is_done=True)
        else:
            for index in answer.finished:
                stream.end_sequence(index)  # news to the engine if a stop string ended it
        return deltas

    async def Complete(  # noqa: N802 - the protocol's name
        self, message: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[inference_pb2.CompleteResponse, None]:
        """Fold the deltas of Generate into one answer. Until that is written the call keeps its place: whoever does not
        read it is held to the same limits as the reader of a stream.
        """
        response = inference_pb2.CompleteResponse()
        texts: dict[int, list[str]] = {}
        completions: dict[int, inference_pb2.Completion] = {}
        async with contextlib.aclosing(self.Generate(message, context, method="Complete")) as deltas:
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
                if not delta.HasField("usage"):
                    continue  # that comes with the last one
                for index, whole in sorted(completions.items()):
                    whole.text = "".join(texts[index])
                    response.completions.append(whole)
                try:
                    yield response
                except CallError as error:
                    await deltas.athrow(error)  # it is Generate's call that ends so
                    raise

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
        return await self._backend.prompt_workers.run(check, message.ByteSize())

    async def _prepare(
        self, request: GenerateRequest, tokenizer: Tokenizer, limits: Limits, account: Account, ticket: Ticket
    ) -> Answer:
        """Tokenize and settle the rest; nothing has been sent to an engine."""
        request_id = self._backend.journal.next_request_id()
        guide = b"" if request.guide is None else await self._backend.compile_guide(request.guide)

        def prepare() -> Answer:
            submit = convert.to_submit(
                request,
                engine_request_id=request_id,
                prompt_token_ids=tokenizer.encode(request.prompt),
                eos_token_ids=self._backend.eos_token_ids,
                limits=limits,
                guide=guide,
            )
            sequences = [
                SequenceState(
                    SequenceText(
                        tokenizer,
                        submit.prompt_token_ids,
                        start.resume_token_ids,
                        stop_strings=request.stop_strings,
                        include_stop=request.include_stop,
                        min_tokens=request.min_tokens,
                        skip_special_tokens=request.output.skip_special_tokens,
                    )
                )
                for start in submit.sequences
            ]
            return Answer(request, submit, sequences, account)

        answer = await self._backend.prompt_workers.run(prepare)
        account.num_prompt_tokens = len(answer.submit.prompt_token_ids)
        account.num_resumed_tokens = sum(len(start.resume_token_ids) for start in answer.submit.sequences)
        num_options = len(request.sampling.logit_bias) + len(request.sampling.allowed_token_ids)
        num_options += len(guide) // GUIDE_BYTES_PER_TOKEN
        ticket.settle(account.num_prompt_tokens + account.num_resumed_tokens + num_options)
        return answer


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

        return await backend.tool_workers.run(encode, message.ByteSize())

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

        return await backend.tool_workers.run(decode, message.ByteSize())
