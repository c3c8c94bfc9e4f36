"""Every rpc of every service, and every group of Generate's options, by grpcurl and reflection alone.

The server itself says what there is: an rpc, or an option, that this file does not call is a failure.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import tiny_model
from tests.e2e.harness import INFERENCE, ReflectionClient, Server, grpcurl, grpcurl_path, json_documents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEALTH = "grpc.health.v1.Health"
SHORT: dict[str, Any] = {"text": "One two", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 6}}
REFLECTION = {"list_services": ""}
CALLS: dict[str, dict[str, Any]] = {
    f"{INFERENCE}/Generate": SHORT,
    f"{INFERENCE}/Complete": SHORT,
    "emberline.v1.TokenizerService/Tokenize": {"text": "One two", "with_pieces": True},
    "emberline.v1.TokenizerService/Detokenize": {"ids": [1000, 1001]},
    "emberline.v1.InfoService/GetModelInfo": {},
    "emberline.v1.InfoService/GetServerInfo": {},
    "emberline.v1.InfoService/GetLoad": {},
    "emberline.v1.AdminService/Abort": {"request_ids": ["nobody"]},
    "emberline.v1.AdminService/Drain": {"grace": "0s"},
    f"{HEALTH}/Check": {"service": "emberline.v1.InferenceService"},
    f"{HEALTH}/List": {},
    f"{HEALTH}/Watch": {"service": "readiness"},
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": REFLECTION,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": REFLECTION,
}
LAST = "emberline.v1.AdminService/Drain"
ENDLESS = {f"{HEALTH}/Watch"}
"""Cut by grpcurl's own time limit once the first answer is there."""

OPTIONS: dict[str, dict[str, Any]] = {
    "request_id": {"request_id": "mine"},
    "model": {"model": "tiny"},
    "token_ids": {"token_ids": {"ids": [1000, 1001]}},
    "chat": {"chat": {"messages": [{"role": "user", "content": "One"}], "add_generation_prompt": True}},
    "encode": {"encode": {"add_special_tokens": False, "parse_special": True}},
    "sampling": {
        "sampling": {
            "temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "presence_penalty": 0.1,
            "frequency_penalty": 0.1, "repetition_penalty": 1.1, "seed": "7", "n": 2, "logit_bias": {"1000": 1.5},
        }
    },
    "allowed_token_ids": {"sampling": {"temperature": 1, "allowed_token_ids": [1000, 1001, 1002]}},
    "stopping": {
        "stopping": {
            "max_tokens": 6, "min_tokens": 1, "stop_strings": ["zq"], "stop_token_ids": [5], "ignore_eos": True,
            "include_stop": True,
        }
    },
    "output": {
        "output": {
            "text": True, "token_ids": True, "logprobs": 1, "prompt_logprobs": 1, "skip_special_tokens": False,
            "stream_interval": 4,
        }
    },
    "guided.json_schema": {"guided": {"json_schema": '{"type": "boolean"}'}},
    "guided.json_object": {"guided": {"json_object": True}},
    "guided.regex": {"guided": {"regex": "[ab]{2}"}},
    "guided.grammar": {"guided": {"grammar": 'root ::= "yes" | "no"'}},
    "guided.choice": {"guided": {"choice": {"options": ["yes", "no"]}}},
    "cache": {"cache": {"bypass": True, "salt": "mine"}},
    "priority": {"priority": -100},
    "max_queue_time": {"max_queue_time": "60s"},
    "max_time": {"max_time": "60s"},
    "resume_token_ids": {"resume_token_ids": [1000, 1001]},
    "resume_on_engine_death": {"resume_on_engine_death": True},
}  # fmt: skip
"""Each group once; `text` is in all that have no other input."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model.make(tmp_path_factory.mktemp("models") / "tiny")
    with Server(
        model=model, served_model_name="tiny", max_num_seqs=8, num_kv_blocks=64, threads=1, enable_admin=True
    ) as running:
        yield running
        # The last rpc, whatever the order of the tests: it answers, and then the server ends by itself.
        ask(running, LAST, CALLS[LAST])
        assert running.wait() == 0


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ReflectionClient]:
    with ReflectionClient(server.address) as connected:
        yield connected


def listed(server: Server, *what: str) -> list[str]:
    """`grpcurl list`, or `grpcurl list SERVICE`."""
    command = [str(grpcurl_path()), "-plaintext", server.address, "list", *what]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True).stdout.split()


def ask(server: Server, method: str, fields: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    run = grpcurl(server.address, method, json.dumps(fields), *flags)
    assert run.returncode == 0, (method, fields, run.stderr)
    return json_documents(run.stdout)


def test_every_rpc_is_called(server: Server) -> None:
    """All that the server lists answers (Drain when all tests are over); Health knows each of its services by name."""
    services = listed(server)
    assert "emberline.v1.AdminService" in services
    methods = {"/".join(method.rsplit(".", 1)) for service in services for method in listed(server, service)}
    assert methods == set(CALLS)
    for method in sorted(methods - {LAST} - ENDLESS):
        assert ask(server, method, CALLS[method]), method
    for method in ENDLESS:
        run = grpcurl(server.address, method, json.dumps(CALLS[method]), "-max-time", "2")
        assert json_documents(run.stdout) == [{"status": "SERVING"}]
    (health,) = ask(server, f"{HEALTH}/List", {})
    assert {name for name in services if name.startswith("emberline.")} <= set(health["statuses"])
    for name in health["statuses"]:
        assert ask(server, f"{HEALTH}/Check", {"service": name}) == [{"status": "SERVING"}]


def test_every_option_of_generate_is_served(server: Server, client: ReflectionClient) -> None:
    """Each group of options once; together they are all that GenerateRequest has, in every one of its messages."""
    used: set[str] = {"text"}
    for name, options in OPTIONS.items():
        fields = {**SHORT, **options}
        if {"token_ids", "chat"} & options.keys():
            del fields["text"]
        responses = ask(server, f"{INFERENCE}/Generate", fields)
        assert "finish" in responses[-1], name
        used |= set(_paths(options))
    described = client.message("emberline.v1.GenerateRequest").DESCRIPTOR
    assert used == set(_all_paths(described)), used ^ set(_all_paths(described))


def test_the_options_do_what_they_say(server: Server) -> None:
    """As grpcurl shows it: n sequences, a prompt's logprobs, a form, no text, tokens in bundles."""
    several = ask(server, f"{INFERENCE}/Generate", SHORT | {"sampling": {"n": 3, "seed": "5"}})
    assert sum("finish" in response for response in several) == 3
    assert {response.get("index", 0) for response in several} == {0, 1, 2}
    scored = SHORT | {"stopping": {"max_tokens": 0}, "output": {"prompt_logprobs": 2}}
    (only,) = ask(server, f"{INFERENCE}/Generate", scored)
    first, second = only["prompt"]["tokens"]
    assert set(first) == {"id"}
    assert second["logprob"] < 0
    assert len(second["top"]) == 2
    (guided,) = ask(server, f"{INFERENCE}/Complete", SHORT | OPTIONS["guided.choice"])
    assert guided["completions"][0]["text"] in ("yes", "no")
    bundled = ask(server, f"{INFERENCE}/Generate", SHORT | {"output": {"token_ids": True, "stream_interval": 3}})
    assert [len(response["tokens"]) >= 3 for response in bundled[:-1]] == [True] * (len(bundled) - 1)


def _paths(fields: dict[str, Any]) -> Iterator[str]:
    """`sampling.top_p` and the like; maps and lists are fields as a whole."""
    for name, value in fields.items():
        yield name
        if isinstance(value, dict) and name in ("sampling", "stopping", "output", "guided", "cache", "encode"):
            yield from (f"{name}.{inner}" for inner in value)


def _all_paths(message: Any) -> Iterator[str]:
    for field in message.fields:
        yield field.name
        if field.name in ("sampling", "stopping", "output", "guided", "cache", "encode"):
            yield from (f"{field.name}.{inner.name}" for inner in field.message_type.fields)
