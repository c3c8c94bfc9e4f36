"""Foreign clients, which have the address and nothing else: grpcurl (reflection v1alpha), buf curl (reflection v1), and
a health probe. Their output is the protocol's JSON as strangers see it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.e2e.harness import INFERENCE, ReflectionClient, Server, buf_curl, grpcurl, json_documents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE_LINER = '{"text": "The capital of France is", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 8}}'
"""The line of the README, to the letter."""
QUESTION: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "sampling": {"temperature": 0},
    "stopping": {"max_tokens": 24},
}
SERVICES = {
    "emberline.v1.InferenceService",
    "emberline.v1.InfoService",
    "emberline.v1.TokenizerService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
Tool = Callable[..., subprocess.CompletedProcess[str]]
TOOLS = pytest.mark.parametrize("tool", [grpcurl, buf_curl], ids=["grpcurl", "buf curl"])


def answers(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert run.returncode == 0, run.stderr
    return json_documents(run.stdout)


def text_of(responses: list[dict[str, Any]]) -> str:
    return "".join(response.get("text", "") for response in responses)


def snake(document: Any) -> Any:
    """Keys as the .proto files write them: buf curl prints lowerCamelCase, grpcurl does not."""
    if isinstance(document, dict):
        return {re.sub(r"(?<=[a-z])([A-Z])", r"_\1", key).lower(): snake(value) for key, value in document.items()}
    return [snake(value) for value in document] if isinstance(document, list) else document


# --------------------------------------------------------------------------------------------------------- Generate


@TOOLS
def test_the_one_liner_streams_paris(server: Server, tool: Tool) -> None:
    """One line of grpcurl, or of buf curl, streams tokens that include " Paris", several messages of them."""
    responses = answers(tool(server.address, f"{INFERENCE}/Generate", json.loads(ONE_LINER)))
    assert len(responses) > 1
    assert " Paris" in text_of(responses)


@TOOLS
def test_chat_streams_paris(server: Server, tool: Tool) -> None:
    """A question as a chat, with no word about templates, is answered."""
    assert "Paris" in text_of(answers(tool(server.address, f"{INFERENCE}/Generate", QUESTION)))


@TOOLS
def test_the_shape_of_a_stream(server: Server, tool: Tool) -> None:
    """In JSON: a flat delta each; `prompt` on the first message only, with the seed as a string since it has 64 bits;
    `finish` and `usage` on the last only; a greedy index 0 is not shown; the same request_id throughout.
    """
    fields = json.loads(ONE_LINER) | {"request_id": "shape", "output": {"token_ids": True}}
    responses = [snake(document) for document in answers(tool(server.address, f"{INFERENCE}/Generate", fields))]
    first, last = responses[0], responses[-1]
    assert {response["request_id"] for response in responses} == {"shape"}
    assert [response for response in responses if "prompt" in response] == [first]
    assert [response for response in responses if "finish" in response or "usage" in response] == [last]
    assert first["prompt"]["count"] == 5
    assert isinstance(first["prompt"]["seed"], str)
    assert 0 <= int(first["prompt"]["seed"]) < 2**64
    assert last["finish"] == {"reason": "FINISH_REASON_MAX_TOKENS"}
    assert last["usage"]["prompt"] == 5
    assert last["usage"]["completion"] == 8
    ids = [token["id"] for response in responses for token in response["tokens"]]
    assert len(ids) == 8
    allowed = {"request_id", "index", "text", "tokens", "prompt", "finish", "usage"}
    assert set().union(*responses) <= allowed
    assert all("index" not in response for response in responses)


@TOOLS
def test_complete_in_one_document(server: Server, tool: Tool) -> None:
    """Complete takes the request of Generate and answers with one JSON document."""
    (document,) = map(snake, answers(tool(server.address, f"{INFERENCE}/Complete", json.loads(ONE_LINER))))
    (completion,) = document["completions"]
    assert completion["text"].startswith(" Paris")
    assert completion["finish"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert document["usage"]["completion"] == 8


@TOOLS
def test_a_bad_request_names_field_and_bounds(server: Server, tool: Tool) -> None:
    """A person who debugs reads, in the tool's own error output, which field is at fault and what it may be."""
    run = tool(server.address, f"{INFERENCE}/Generate", {"text": "a", "sampling": {"temperature": 101}})
    assert run.returncode != 0
    said = run.stdout + run.stderr
    assert "sampling.temperature" in said
    assert "[0, 100]" in said
    assert re.search("invalid_?argument", said, re.IGNORECASE)


def test_a_misspelt_field_never_reaches_the_server(server: Server) -> None:
    """Reflection gives the tool the fields' names, so a typo is the tool's own error."""
    run = grpcurl(server.address, f"{INFERENCE}/Generate", {"text": "a", "stoping": {}})
    assert run.returncode != 0
    assert "stoping" in run.stderr


# --------------------------------------------------------------------------------------------------------- reflection


def test_grpcurl_lists_and_describes(server: Server) -> None:
    """`grpcurl list` tells the services split by caller, without AdminService; `describe` every rpc and every field."""
    listed = grpcurl(server.address, "list")
    assert set(listed.stdout.split()) == SERVICES
    described = grpcurl(server.address, "describe")
    assert described.returncode == 0, described.stderr
    assert "rpc Generate ( .emberline.v1.GenerateRequest ) returns ( stream .emberline.v1.GenerateResponse );" in (
        described.stdout
    )
    assert "rpc Complete ( .emberline.v1.GenerateRequest ) returns ( .emberline.v1.CompleteResponse );" in (
        described.stdout
    )


def _ask_reflection(channel: grpc.Channel, version: str, **fields: Any) -> Any:
    """One question to one version of reflection; the messages of both have the same bytes."""
    stub = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = stub(iter([reflection_pb2.ServerReflectionRequest(**fields)]), timeout=60.0)
    return answer


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_both_versions_of_reflection(client: ReflectionClient, version: str) -> None:
    """Reflection v1 and v1alpha tell the same: the services, the file of a symbol with all it imports, and NOT_FOUND
    for what is not there.
    """
    listed = _ask_reflection(client.channel, version, list_services="")
    assert {service.name for service in listed.list_services_response.service} == SERVICES
    for symbol in (*SERVICES, "emberline.v1.FinishReason"):
        found = _ask_reflection(client.channel, version, file_containing_symbol=symbol)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in found.file_descriptor_response.file_descriptor_proto
        ]
        assert files, f"{version} does not know {symbol}"
        assert any(symbol.startswith(file.package) for file in files)
    missing = _ask_reflection(client.channel, version, file_containing_symbol="emberline.v1.NoSuchThing")
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# -------------------------------------------------------------------------------------------------------------- health


@TOOLS
@pytest.mark.parametrize("service", ["", "readiness", "liveness", INFERENCE])
def test_health_by_tool(server: Server, tool: Tool, service: str) -> None:
    """Probes find SERVING under every name the design gives."""
    assert answers(tool(server.address, "grpc.health.v1.Health/Check", {"service": service})) == [{"status": "SERVING"}]


def test_health_as_a_probe_asks(server: Server) -> None:
    """What grpc-health-probe and Kubernetes do: a fresh connection, one Check within a second, by the plain method
    path, no reflection. A name that is not there is NOT_FOUND.
    """
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")  # bytes in, bytes out
        assert check(b"", timeout=10.0, wait_for_ready=True) == b"\x08\x01"
        name = b"readiness"
        assert check(b"\x0a" + bytes([len(name)]) + name, timeout=10.0) == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as told:
            check(b"\x0a\x04nope", timeout=10.0)
    assert told.value.code() is grpc.StatusCode.NOT_FOUND
