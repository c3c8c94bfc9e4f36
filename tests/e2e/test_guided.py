"""Guided decoding through the wire: outputs that fulfil what they are held to, and guides that harm nobody.

One server of a tiny model, which says nonsense unless it is held to something; engines that die are replayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import psutil
import pytest

from scripts.fault_suite import schemas
from tests.e2e import tiny_model
from tests.e2e.harness import Generation, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
COMPILER = "scheduler.engine.guide_process"
CANARY = "Quetzalbramble"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Killed at the end, without a chance to tidy up: nothing of it may live on."""
    model = tiny_model.make(tmp_path_factory.mktemp("model") / "tiny")
    with Server(model=model, on_engine_death="replay", num_kv_blocks=128, guide_compile_timeout=1) as server:
        yield server
        compilers = [child for child in psutil.Process(server.pid).children() if COMPILER in child.cmdline()]
        server.signal(signal.SIGKILL)
        server.wait()
        _, alive = psutil.wait_procs(compilers, timeout=60)
        assert not alive, "the compiler outlives its server"
        assert CANARY not in server.raw_stderr


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ReflectionClient]:
    with ReflectionClient(server.address) as client:
        yield client


def compiler_pid(server: Server) -> int:
    """Of the compiler's process; its jobs are children of it."""
    children = psutil.Process(server.pid).children()
    (pid,) = [child.pid for child in children if COMPILER in child.cmdline()]
    return pid


def ask(client: ReflectionClient, guide: dict[str, Any], seed: int = 0, **fields: Any) -> Generation:
    request: dict[str, Any] = {
        "text": "The record: ",
        "sampling": {"temperature": 1, "seed": str(seed)},
        "stopping": {"max_tokens": 1024},
        "output": {"token_ids": True},
        "guided": guide,
    }
    return client.generate(**{**request, **fields})


def text_of(generation: Generation) -> str:
    generation.expect_ok()
    assert generation.finish_reason == "EOS"
    return generation.text


def test_the_model_info_tells_what_guides_may_be(client: ReflectionClient) -> None:
    """The capability and the bounds."""
    info = client.call("InfoService/GetModelInfo")
    assert info.capabilities.guided
    assert info.limits.max_guide_bytes == 65_536
    assert info.limits.max_guide_choices == 1024


def test_json_fulfils_its_schema(client: ReflectionClient) -> None:
    """Random schemas at temperature 1, side by side: each output ends by itself, is JSON, and valid."""
    with ThreadPoolExecutor(6) as pool:
        found = [schemas.random_schema(seed) for seed in range(10)]
        answers = list(pool.map(lambda one: ask(client, {"json_schema": json.dumps(one[1])}, one[0]), enumerate(found)))
    for schema, answer in zip(found, answers, strict=True):
        jsonschema.validate(json.loads(text_of(answer)), schema)


def test_the_other_kinds(client: ReflectionClient) -> None:
    """An expression, a choice, any object (cut short it is the beginning of one), a grammar."""
    assert re.fullmatch("[A-Z][a-z]{2,5}-[0-9]{3}", text_of(ask(client, {"regex": "[A-Z][a-z]{2,5}-[0-9]{3}"})))
    options = ["yes", "no", 'a "quoted" one\n', "naïve 🙂"]
    said = {text_of(ask(client, {"choice": {"options": options}}, seed)) for seed in range(12)}
    assert said <= set(options)
    assert len(said) > 1
    assert ask(client, {"json_object": True}, stopping={"max_tokens": 8}).expect_ok().text.startswith("{")
    grammar = 'root ::= item ("," item){2}\nitem ::= [0-9] | "x" [a-c]'
    assert re.fullmatch("([0-9]|x[a-c])(,([0-9]|x[a-c])){2}", text_of(ask(client, {"grammar": grammar})))


def test_several_sequences_each_follow_the_guide(client: ReflectionClient) -> None:
    """They share the guide, not its state."""
    answer = ask(client, {"regex": "[a-f]{3,9}"}, sampling={"temperature": 1, "seed": "5", "n": 4}).expect_ok()
    texts = ["".join(r.text for r in answer.responses if r.index == index) for index in range(4)]
    assert all(re.fullmatch("[a-f]{3,9}", text) for text in texts)
    assert len(set(texts)) > 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "malformed schema": ({"json_schema": f'{{"type": "{CANARY}"}}'}, "guided.json_schema"),
    "malformed regex": ({"regex": f"({CANARY}"}, "guided.regex"),
    "malformed grammar": ({"grammar": f"root ::= {CANARY}"}, "guided.grammar"),
    "too long": ({"regex": CANARY * 6000}, "guided.regex"),
    "endless": ({"grammar": "root ::= root root root"}, "guided.grammar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_guide_that_is_none_names_its_field_and_quotes_nothing(client: ReflectionClient, name: str) -> None:
    """INVALID_ARGUMENT, in one answer."""
    guide, field = REFUSED[name]
    status = ask(client, guide).expect(INVALID).status
    assert set(status.field_violations) == {field}
    assert CANARY not in repr(status)


def test_a_schema_that_asks_for_more_than_it_would_get(client: ReflectionClient) -> None:
    """An output that breaks it would pass for valid: UNIMPLEMENTED, by the keyword's name."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    status = ask(client, {"json_schema": json.dumps(schema)}).expect(grpc.StatusCode.UNIMPLEMENTED).status
    assert "uniqueItems" in status.metadata["options"]


def test_explosive_guides_harm_nobody(server: Server, client: ReflectionClient) -> None:
    """Four at once, over the limit of time or memory: each is told so. Meanwhile a stream without a guide gets what it
    gets alone, and new guides are compiled. A repeat is refused from memory. No engine dies of any of it.
    """
    guides = [*(schemas.explosive(seed) for seed in range(3)), {"regex": "a?" * 2500 + "a" * 2500}]
    num_fatal = len(server.fatal_errors)
    plain = {"text": "Once", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 64, "ignore_eos": True}}
    alone = client.generate(**plain).expect_ok().text
    with ThreadPoolExecutor(6) as pool:
        refusals = [pool.submit(ask, client, guide) for guide in guides]
        neighbour = pool.submit(client.generate, **plain)
        other = pool.submit(ask, client, {"regex": "[g-k]{4}"})
        for refusal in refusals:
            assert refusal.result().expect(INVALID, "GUIDE_LIMIT").status.metadata["limit"] in {"time", "memory"}
        assert neighbour.result().expect_ok().text == alone
        assert re.fullmatch("[g-k]{4}", text_of(other.result()))
    pid = compiler_pid(server)
    ask(client, guides[0]).expect(INVALID, "GUIDE_LIMIT")
    assert compiler_pid(server) == pid
    assert len(server.fatal_errors) == num_fatal


def test_resumed_tokens_go_on_where_they_were(client: ReflectionClient) -> None:
    """What follows is what would have followed; tokens that do not follow the guide are the caller's mistake."""
    guide = {"json_schema": json.dumps(schemas.random_schema(3))}
    whole = ask(client, guide, seed=9)
    ids = whole.expect_ok().token_ids
    half = len(ids) // 2
    rest = ask(client, guide, seed=9, resume_token_ids=ids[:half])
    assert rest.expect_ok().token_ids == ids[half:]
    status = ask(client, guide, resume_token_ids=ids[1:half]).expect(INVALID, "BAD_GUIDE").status
    assert set(status.field_violations) == {"resume_token_ids"}


def test_a_guide_that_other_options_leave_no_way(client: ReflectionClient) -> None:
    """It ends where nothing may be sampled any more, with a status that says why."""
    told = ask(client, {"regex": "[a-c]{3}"}, stopping={"max_tokens": 64, "min_tokens": 30})
    told.expect(INVALID, "GUIDE_DEAD_END")
    client.generate(text="a", stopping={"max_tokens": 4}).expect_ok()


def test_a_death_of_the_engine_changes_no_output(server: Server, client: ReflectionClient) -> None:
    """Killed in the midst of guided streams: with replay each goes on to the text that it has undisturbed."""
    guides = [{"regex": f"[{letters}]{{300}}"} for letters in ("a-z", "0-9", "A-F")]
    num_fatal = len(server.fatal_errors)
    undisturbed = [text_of(ask(client, guide, seed)) for seed, guide in enumerate(guides)]
    begun = [threading.Event() for _ in guides]
    with ThreadPoolExecutor(3) as pool:
        streams = [
            pool.submit(ask, client, guide, seed, on_response=lambda _, event=begun[seed]: event.set())
            for seed, guide in enumerate(guides)
        ]
        for event in begun:
            assert event.wait(120)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert [text_of(stream.result()) for stream in streams] == undisturbed
    assert len(server.fatal_errors) == num_fatal + 1


def test_a_death_of_the_compiler_is_nobodys_business(server: Server, client: ReflectionClient) -> None:
    """Known guides go on without it, the next unknown one starts another; it is no engine's death."""
    num_fatal = len(server.fatal_errors)
    known = {"regex": "[a-d]{5}"}
    text_of(ask(client, known))
    pid = compiler_pid(server)
    os.kill(pid, signal.SIGKILL)
    text_of(ask(client, known))
    assert re.fullmatch("[l-p]{5}", text_of(ask(client, {"regex": "[l-p]{5}"})))
    assert compiler_pid(server) != pid
    assert len(server.fatal_errors) == num_fatal


def test_no_guide_is_in_a_command_line(server: Server, client: ReflectionClient) -> None:
    """Nor in the title of any process, while it is compiled; the log is looked at when the server ends."""
    guide = {"json_schema": json.dumps({"type": "object", "properties": {CANARY + str(n): {} for n in range(1200)}})}
    with ThreadPoolExecutor(1) as pool:
        refusal = pool.submit(ask, client, guide)
        while not refusal.done():
            for process in psutil.Process(server.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    assert CANARY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        refusal.result().expect(INVALID)
