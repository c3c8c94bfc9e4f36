"""What callers send, and what opens the doors, is seen by nobody but the model.

Each secret has a mark of its own, drawn at random. They go through everything that can happen to a call: served,
refused, unreadable, contained, cut by a death and by the end of the server. Then every trace that the server has left
is searched for them: its log at debug, its statuses, crash reports, metrics, termination log, and the names of its
processes.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.certificates import Authority
from tests.e2e import tiny_model
from tests.e2e.faults import FaultFile
from tests.e2e.harness import CHANNEL_OPTIONS, INFERENCE, ReflectionClient, Server
from tests.e2e.secrets import Mount, credentials, token_line

pytestmark = pytest.mark.timeout(300)

HANG_S = 120.0
ENDLESS = {"max_tokens": 2000, "ignore_eos": True}
CAUGHT = 31_337
"""A token over which an armed engine raises."""


class Marks(dict[str, str]):
    """By what they are put into; each is made when it is first asked for."""

    def __missing__(self, what: str) -> str:
        self[what] = f"Zq{secrets.token_hex(8)}"
        return self[what]


class Traces(dict[str, str]):
    """All that can be searched, by where it is."""

    def add_processes(self, server: Server) -> None:
        """What `ps` and /proc tell of each."""
        process = psutil.Process(server.pid)
        for one in (process, *process.children(recursive=True)):
            for name in ("cmdline", "comm", "status"):
                self[f"/proc/{one.pid}/{name}"] = Path(f"/proc/{one.pid}/{name}").read_text()

    def add_files(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self[str(path)] = path.read_bytes().decode("latin1")


class Caller:
    """Sends what is to be secret, and keeps all that it is told about it."""

    def __init__(self, client: ReflectionClient, marks: Marks, traces: Traces) -> None:
        self._client = client
        self._marks = marks
        self._traces = traces
        self._num_told = 0

    def tell(self, call: Any) -> None:
        """Into the traces: everything of a status, and of the metadata beside it."""
        self._num_told += 1
        metadata = [*(call.initial_metadata() or ()), *(call.trailing_metadata() or ())]
        told = " ".join(value.decode("latin1") if isinstance(value, bytes) else value for _, value in metadata)
        self._traces[f"status {self._num_told}"] = f"{call.code()} {call.details()} {told}"

    def call(self, path: str, **fields: Any) -> grpc.StatusCode:
        """One call to its end."""
        stub, request = self._client.stub(path), self._client.request(path, **fields)
        metadata = [("x-mark", self._marks["metadata"])]
        is_unary = not self._client.method(path).server_streaming
        begin = stub.future if is_unary else stub  # type: ignore[attr-defined]
        call = begin(request, metadata=metadata, timeout=HANG_S)
        code = ended(call, is_unary=is_unary)
        self.tell(call)
        return code

    def generate(self, **fields: Any) -> grpc.StatusCode:
        return self.call(f"{INFERENCE}/Generate", **fields)

    def raw(self, path: str, data: bytes) -> grpc.StatusCode:
        """Bytes that may be no message."""
        call = self._client.channel.unary_stream("/" + path)(data, timeout=HANG_S)
        code = ended(call)
        self.tell(call)
        return code


def ended(call: Any, *, is_unary: bool = False) -> grpc.StatusCode:
    """How a call ended; waits for it."""
    try:
        if is_unary:
            call.result()
        else:
            for _ in call:
                pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = call.code()
    return code


def everything(marks: Marks, caller: Caller) -> set[grpc.StatusCode]:
    """Every place where a caller can put text, in calls that are served and in calls that are refused."""
    bad, refused_sampling = {"temperature": -1}, {"top_p": 7}
    chat = {"messages": [{"role": "user", "content": marks["chat"]}]}
    guided = [
        {"json_schema": f'{{"const": "{marks["schema"]}"}}'},
        {"json_schema": f'{{"type": "{marks["bad schema"]}"}}'},
        {"regex": f"{marks['regex']}[0-9]"},
        {"regex": f"{marks['bad regex']}(("},
        {"grammar": f'root ::= "{marks["grammar"]}"'},
        {"grammar": f"root ::= {marks['bad grammar']}"},
        {"choice": {"options": [marks["choice"], "b"]}},
    ]
    short = {"max_tokens": 4}
    codes = [
        caller.generate(text=marks["text"], stopping=short, cache={"salt": marks["salt"]}),
        caller.generate(text=marks["refused text"], sampling=bad, cache={"salt": marks["salt"] * 20}),
        caller.generate(chat=chat, stopping={**short, "stop_strings": [marks["stop string"]]}),
        caller.generate(chat=chat, sampling=refused_sampling, stopping={"stop_strings": [marks["stop string"] * 99]}),
        caller.generate(chat={"messages": [{"role": f"{marks['role']}!", "content": "a"}]}),
        caller.generate(text="a", model=marks["model"]),
        caller.generate(text="a", request_id=marks["label"], stopping=short),
        caller.generate(text="a", request_id=f"{marks['no label']}\n"),
        caller.generate(text=marks["long text"] * 20_000),
        caller.generate(token_ids={"ids": [tiny_model.POISON]}, stopping=short),
        *(caller.generate(text=marks["guided text"], guided=guide, stopping=short) for guide in guided),
        caller.call(f"{INFERENCE}/Complete", text=marks["complete"], stopping=short),
        caller.call("TokenizerService/Tokenize", text=marks["tokenize"], with_pieces=True),
        caller.call("TokenizerService/Tokenize", text=marks["tokenize"], model=marks["model"]),
        caller.call("InfoService/GetModelInfo", model=marks["model"]),
        caller.call("AdminService/Abort", request_ids=[f"{marks['no label']}\n"]),
        caller.raw("emberline.v1.InferenceService/Generate", b"\x1a\x20" + marks["no UTF-8"].encode() + b"\xff" * 14),
        caller.raw("emberline.v1.InferenceService/Generate", b"\xff" + marks["no message"].encode()),
        caller.raw(f"emberline.v1.{marks['method']}/Nothing", b""),
        caller.raw("grpc.health.v1.Health/Check", bytes([10, len(marks["service"])]) + marks["service"].encode()),
    ]
    return set(codes)


def test_secrets_leave_no_trace(tmp_path: Path) -> None:
    """No mark is in any trace, nor is the key of the certificate, the text that was generated, or the ids of a prompt;
    and the search finds a mark that may be there, so it would have found the others.
    """
    marks, traces = Marks(), Traces()
    authority, fault = Authority(), FaultFile(tmp_path)
    pair, mount = authority.server(), Mount(tmp_path / "secrets")
    tokens = token_line("caller", "inference,info,admin", marks["token"])
    mount.put(cert=pair.chain, key=pair.key, client_ca=authority.pem, tokens=tokens.encode())
    flags: dict[str, Any] = {
        "model": tiny_model.make(tmp_path / "model"),
        "tls_cert": mount.path("cert"),
        "tls_key": mount.path("key"),
        "tls_client_ca": mount.path("client_ca"),
        "auth_tokens": mount.path("tokens"),
        "enable_admin": True,
        "admin_clients": "ops.test",
        "metrics_port": 0,
        "log_level": "debug",
        "max_engine_restarts": 1,
        "crash_dir": tmp_path / "crashes",
        "termination_log": tmp_path / "termination-log",
    }
    key_line = pair.key.splitlines()[1].decode()
    ids = [20_000 + 37 * number for number in range(24)]
    ops = authority.client("ops.test")
    generated = ""

    with Server(env=fault.env, **flags) as server:
        channel = credentials(authority.pem, ops, marks["token"])
        with ReflectionClient(server.address, credentials=channel) as client:
            caller = Caller(client, marks, traces)
            codes = everything(marks, caller)
            wrong = grpc.secure_channel(
                server.address, credentials(authority.pem, ops, marks["wrong token"]), CHANNEL_OPTIONS
            )
            refused = wrong.unary_stream(f"/{INFERENCE}/Generate")(b"", timeout=HANG_S)
            codes.add(ended(refused))
            caller.tell(refused)
            wrong.close()
            fault.commit(f"poison raise {CAUGHT}")
            codes.add(caller.generate(token_ids={"ids": [CAUGHT, *ids]}, stopping=ENDLESS))
            tokens_put = mount.path("tokens").read_bytes()
            mount.put(cert=pair.chain, key=key_line.encode(), client_ca=authority.pem, tokens=tokens_put + b"\nbroken")
            server.wait_for_log("certificates not reloaded")
            server.wait_for_log("auth tokens not reloaded")

            live = []
            for number in range(2):  # two deaths: it comes back from the first, and gives up at the second
                text = client.stream(text=marks["dying text"], stopping=ENDLESS, sampling={"seed": 1})
                by_ids = client.stream(token_ids={"ids": ids}, stopping=ENDLESS, output={"logprobs": 1})
                live += [text, by_ids]
                for call in (text, by_ids):
                    generated += next(call).text
                for _ in range(30):
                    generated += next(text).text
                if number == 0:
                    traces.add_processes(server)
                    (serving,) = server.events("serving")
                    with urllib.request.urlopen(f"http://{serving['metrics_address']}/metrics", timeout=HANG_S) as page:
                        traces["metrics"] = page.read().decode()
                os.kill(server.engine_pid(), signal.SIGKILL)
                for call in (text, by_ids):
                    codes.add(ended(call))
                    caller.tell(call)
                if number == 0:
                    wait_ready(client)
            assert server.wait() == 4
        traces["log"] = server.raw_stderr
    traces["termination log"] = (tmp_path / "termination-log").read_text()
    traces.add_files(tmp_path / "crashes")

    names = {code.name for code in codes}
    assert {
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "UNAVAILABLE",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
        "INTERNAL",
    } <= names
    assert len([name for name in traces if name.startswith(str(tmp_path / "crashes"))]) == 2
    assert len(server.fatal_errors) == 2
    assert any(record["event"] == "request finished" and record.get("client") == "caller" for record in server.logs)
    assert traces["termination log"]
    assert "emberline_" in traces["metrics"]
    longest = max(generated.split("\ufffd"), key=len)
    assert len(longest) > 8
    wanted = {**marks, "key": key_line, "generated text": longest, "ids": ", ".join(map(str, ids[:6]))}
    found = [(what, where) for what, mark in wanted.items() for where, text in traces.items() if mark in text]
    # A valid label is meant for the log and for crash reports.
    assert ("label", "log") in found
    assert [(what, where) for what, where in found if what != "label"] == []


def wait_ready(client: ReflectionClient) -> None:
    deadline = time.monotonic() + HANG_S
    while client.health.check("readiness") != "SERVING":
        assert time.monotonic() < deadline
        time.sleep(0.05)
