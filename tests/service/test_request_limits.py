"""Everything in a request that can be long has a limit, and the limit is enforced: found by walking the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from emberline.v1 import admin_pb2, inference_pb2, info_pb2, tokenizer_pb2
from service.convert import ABORT_IDS_MAX, MODEL_NAME_CHARS_MAX
from service.health import NAME_CHARS_MAX
from service.request import CACHE_SALT_BYTES_MAX, REQUEST_ID_BYTES_MAX, Limits
from tests.service.front_end import Running, error_of, running
from tests.service.support import HANG_S

FILES = (inference_pb2, tokenizer_pb2, info_pb2, admin_pb2, health_pb2)
ROLE_CHARS_MAX = 64


def long_fields(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Paths of all lists, maps, strings and bytes in a message; `[]` is an element of a list."""
    for field in message.fields:
        path = prefix + field.name
        if field.is_repeated:
            yield path
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield path + "[]" * field.is_repeated
        elif field.message_type is not None and not is_map:
            yield from long_fields(field.message_type, f"{path}{'[]' * field.is_repeated}.")


def requests() -> dict[str, Descriptor]:
    """Request types, by one of the rpcs that take them."""
    return {
        method.input_type.full_name: method.input_type
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


# One beyond each limit. In a list of messages and of strings that is the number, and the length of an element.

Build = Callable[[Limits], dict[str, Any]]
ONE = {"token_ids": {"ids": [1]}}


def chat(**turn: str) -> dict[str, Any]:
    return {"chat": {"messages": [{"role": "user", "content": "c", **turn}]}}


MODEL: Build = lambda _: {"model": "m" * (MODEL_NAME_CHARS_MAX + 1)}  # noqa: E731 - a table of them
CHAT: dict[str, Build] = {
    "chat.messages": lambda limits: {
        "chat": {"messages": [{"role": "user", "content": "c"}] * (limits.max_chat_messages + 1)}
    },
    "chat.messages[].role": lambda _: chat(role="r" * (ROLE_CHARS_MAX + 1)),
    "chat.messages[].content": lambda limits: chat(content="c" * ((limits.max_text_bytes or 0) + 1)),
}
TEXT: Build = lambda limits: {"text": "t" * ((limits.max_text_bytes or 0) + 1)}  # noqa: E731
BEYOND: dict[str, dict[str, Build]] = {
    "emberline.v1.GenerateRequest": {
        "request_id": lambda _: ONE | {"request_id": "r" * (REQUEST_ID_BYTES_MAX + 1)},
        "model": lambda limits: ONE | MODEL(limits),
        "text": TEXT,
        "token_ids.ids": lambda limits: {"token_ids": {"ids": [1] * (limits.max_model_len + 1)}},
        **CHAT,
        "sampling.logit_bias": lambda limits: (
            ONE | {"sampling": {"logit_bias": dict.fromkeys(range(limits.vocab_size + 1), 1.0)}}
        ),
        "sampling.allowed_token_ids": lambda limits: (
            ONE | {"sampling": {"allowed_token_ids": [*range(limits.vocab_size), 0]}}
        ),
        "stopping.stop_strings": lambda limits: (
            ONE | {"stopping": {"stop_strings": ["s"] * (limits.max_stop_strings + 1)}}
        ),
        "stopping.stop_strings[]": lambda limits: (
            ONE | {"stopping": {"stop_strings": ["s" * (limits.max_stop_string_bytes + 1)]}}
        ),
        "stopping.stop_token_ids": lambda limits: (
            ONE | {"stopping": {"stop_token_ids": [1] * (limits.max_stop_token_ids + 1)}}
        ),
        "guided.json_schema": lambda limits: ONE | {"guided": {"json_schema": "{" * (limits.max_guide_bytes + 1)}},
        "guided.regex": lambda limits: ONE | {"guided": {"regex": "a" * (limits.max_guide_bytes + 1)}},
        "guided.grammar": lambda limits: ONE | {"guided": {"grammar": "a" * (limits.max_guide_bytes + 1)}},
        "guided.choice.options": lambda limits: (
            ONE | {"guided": {"choice": {"options": [str(i) for i in range(limits.max_guide_choices + 1)]}}}
        ),
        "guided.choice.options[]": lambda limits: (
            ONE | {"guided": {"choice": {"options": ["a" * (limits.max_guide_bytes + 1)]}}}
        ),
        "cache.salt": lambda _: ONE | {"cache": {"salt": "s" * (CACHE_SALT_BYTES_MAX + 1)}},
        "resume_token_ids": lambda limits: ONE | {"resume_token_ids": [1] * (limits.max_model_len + 1)},
    },
    "emberline.v1.TokenizeRequest": {"model": lambda limits: {"text": "t"} | MODEL(limits), "text": TEXT, **CHAT},
    "emberline.v1.DetokenizeRequest": {
        "model": MODEL,
        "ids": lambda limits: {"ids": [1] * (limits.max_model_len + 1)},
    },
    "emberline.v1.GetModelInfoRequest": {"model": MODEL},
    "emberline.v1.AbortRequest": {
        "request_ids": lambda _: {"request_ids": ["r"] * (ABORT_IDS_MAX + 1)},
        "request_ids[]": lambda _: {"request_ids": ["r" * (REQUEST_ID_BYTES_MAX + 1)]},
    },
    "grpc.health.v1.HealthCheckRequest": {"service": lambda _: {"service": "n" * (NAME_CHARS_MAX + 1)}},
}


def test_every_field_that_can_be_long_is_in_the_table() -> None:
    """A new one fails here until its limit is below."""
    walked = {name: set(long_fields(message)) for name, message in requests().items()}
    assert {name: paths for name, paths in walked.items() if paths} == {
        name: set(table) for name, table in BEYOND.items()
    }


def violated_fields(error: grpc.aio.AioRpcError) -> set[str]:
    trailing = dict(error.trailing_metadata())
    bad_request = error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details:
        if detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
    return {violation.field for violation in bad_request.field_violations}


async def outcome(run: Running, path: str, message: Message) -> grpc.aio.AioRpcError:
    call = run.channel.unary_stream(path, request_serializer=lambda value: value.SerializeToString())
    return await error_of(call(message, timeout=HANG_S))


async def test_one_beyond_each_limit_is_refused_by_name(model: Path) -> None:
    """INVALID_ARGUMENT, and its violation names the field or its element, and no other."""
    wrong = []
    async with running(model, "--enable-admin") as run:
        limits = run.server._backend.limits
        assert limits is not None
        assert limits.max_text_bytes is not None
        for file in FILES:
            for service in file.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    for field, build in BEYOND.get(method.input_type.full_name, {}).items():
                        message = GetMessageClass(method.input_type)(**build(limits))
                        error = await outcome(run, f"/{service.full_name}/{method.name}", message)
                        bare = field.replace("[]", "[0]")
                        named = violated_fields(error) if error.code() is grpc.StatusCode.INVALID_ARGUMENT else set()
                        if not named or not named <= {bare, bare.partition("[0].")[0], field.removesuffix("[]")}:
                            wrong.append((method.full_name, field, error.code(), named))
        await run.wait_idle()
    assert wrong == []
