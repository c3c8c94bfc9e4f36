"""The commands that callers have, by the entry points that their distribution declares."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from emberline.commands import exit as status
from emberline.commands.main import main
from tests.client import fake_server
from tests.client.fake_server import LIMIT_S, Attempt, End, FakeServer, word

CODES = grpc.StatusCode
TEN_WORDS = "".join(map(word, range(10)))
SCRIPT = Path(sys.executable).with_name("emberline")


def run(server: FakeServer | str, command: str, *arguments: str) -> int:
    address = server if isinstance(server, str) else server.address
    return main([command, *arguments, "--address", address])


class TestDispatch:
    def test_help_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Those of both distributions, each with a line of its own."""
        assert main(["--help"]) == 0
        listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
        assert listed == ["autopsy", "generate", "health", "serve", "top"]

    @pytest.mark.parametrize("arguments", [[], ["no-such"]])
    def test_what_is_no_command(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """Told on stderr, with the callers' status for wrong usage."""
        assert main(arguments) == status.USAGE
        told = capsys.readouterr()
        assert not told.out
        assert "generate" in told.err

    @pytest.mark.parametrize(("before", "after"), [(None, "NONE"), ("debug", "debug")])
    def test_grpc_is_told_to_be_quiet(
        self, before: str | None, after: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Before anything imports it, unless the caller wants to hear it: stderr is for the command's own words."""
        monkeypatch.setenv("GRPC_VERBOSITY", before or "")
        if before is None:
            monkeypatch.delenv("GRPC_VERBOSITY")
        assert main(["--version"]) == 0
        assert os.environ["GRPC_VERBOSITY"] == after
        assert capsys.readouterr().out.startswith("emberline ")

    @pytest.mark.slow
    def test_a_command_is_loaded_only_when_asked_for(self) -> None:
        """`emberline health` imports nothing of the server: half a second that probes need not spend."""
        code = (
            "import sys; from emberline.commands.main import main; main(['health', '--address', '127.0.0.1:1', "
            "'--timeout', '0.2']); sys.exit('service' in sys.modules or 'scheduler' in sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, capture_output=True)


class TestStreams:
    """What becomes of a command whose stdin, stdout or stderr is not what it should be."""

    @staticmethod
    def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        """`emberline` is the installed script."""
        line = f'emberline() {{ "{SCRIPT}" "$@"; }}; {command}'
        environment = {**os.environ, **environment}
        return subprocess.run(["bash", "-c", line], capture_output=True, timeout=LIMIT_S, env=environment, check=False)

    def test_closed_ones(self) -> None:
        """Closed ones are silence; none of them is a socket by accident."""
        with FakeServer() as server:
            ended = self.shell(
                f"emberline generate --address {server.address} x >&- || exit 1;"
                f"emberline generate --address {server.address} - <&- || exit 2;"
                f"emberline generate --address {server.address} - <&- >&- 2>&- || exit 3;"
                f"emberline health --address {server.address} >&- || exit 4"
            )
        assert (ended.returncode, ended.stderr) == (0, b"")

    @pytest.mark.parametrize("command", ["generate x", "health", "top --once --interval 0.1", "--version"])
    def test_a_full_disk(self, command: str) -> None:
        """One line, and not the status of a whole answer."""
        with FakeServer() as server:
            name, *rest = command.split()
            address = [] if name.startswith("-") else ["--address", server.address]
            ended = self.shell(f"emberline {' '.join([name, *address, *rest])} >/dev/full")
        assert (ended.returncode, ended.stderr) == (status.FAILED, b"emberline: error: No space left on device\n")

    def test_a_reader_that_leaves(self) -> None:
        """The status of SIGPIPE, and nothing said, for a command that would go on for ever, too."""
        with FakeServer() as server:
            ended = self.shell(f"emberline top --interval 0.1 --address {server.address} | head -n 1; exit $PIPESTATUS")
        assert (ended.returncode, ended.stderr) == (status.PIPE_CLOSED, b"")
        assert ended.stdout

    def test_characters_that_are_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In an answer: replaced. In a prompt: told."""
        monkeypatch.setattr(fake_server, "word", lambda _: "caf\u00e9")
        with FakeServer() as server:
            command = f"emberline generate --max-tokens 1 --address {server.address} x"
            ended = self.shell(command, PYTHONIOENCODING="ascii")
            assert (ended.returncode, ended.stdout) == (0, b"caf?")
            command = f"printf '\\xff' | emberline generate --address {server.address}"
            ended = self.shell(command, PYTHONIOENCODING="utf-8:strict")
        assert (ended.returncode, ended.stderr.count(b"\n")) == (status.USAGE, 1)


class TestGenerate:
    def test_text_comes_as_it_is_made(self, capsys: pytest.CaptureFixture[str]) -> None:
        """On stdout the text and nothing else; flags arrive in the request."""
        flags = ["--temperature", "0", "--max-tokens", "6", "--stop", "a", "--stop", "b", "--seed", "7", "--ignore-eos"]
        with FakeServer() as server:
            assert run(server, "generate", "the prompt", *flags) == status.DONE
        told = capsys.readouterr()
        assert told.out == "".join(map(word, range(6)))
        assert told.err == ""
        (request,) = server.requests
        assert request.text == "the prompt"
        assert request.sampling.HasField("temperature")
        assert request.sampling.seed == 7
        assert list(request.stopping.stop_strings) == ["a", "b"]
        assert request.stopping.ignore_eos
        assert request.stopping.max_tokens == 6
        assert not request.sampling.HasField("top_p")

    @pytest.mark.parametrize("arguments", [[], ["-"]])
    def test_a_prompt_from_stdin(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """All of it, line ends included."""
        monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
        with FakeServer() as server:
            assert run(server, "generate", *arguments) == status.DONE
        assert server.requests[0].text == "two\nlines\n"

    def test_json_for_scripts(self, capsys: pytest.CaptureFixture[str]) -> None:
        """One object a line for each delta, the last one with finish and usage; what is absent is left out."""
        with FakeServer() as server:
            assert run(server, "generate", "x", "--json", "--with-token-ids") == status.DONE
        deltas = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert "".join(delta["text"] for delta in deltas) == TEN_WORDS
        assert [len(delta["tokens"]) for delta in deltas] == [1] * 10
        assert deltas[-1]["finish"] == {"reason": "MAX_TOKENS", "matched": None, "matched_token_id": None}
        assert deltas[-1]["usage"]["completion"] == 10
        assert all("usage" not in delta for delta in deltas[:-1])

    def test_a_broken_stream_goes_on_unless_told_otherwise(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Resume is what a person at a terminal wants; --no-resume shows the break."""
        broken = Attempt(3, End(CODES.UNAVAILABLE, "ENGINE_DEAD", {"death_id": "d1"}))
        with FakeServer(broken, Attempt(), broken) as server:
            assert run(server, "generate", "x") == status.DONE
            assert capsys.readouterr().out == TEN_WORDS
            assert run(server, "generate", "x", "--no-resume") == status.UNREACHABLE
        told = capsys.readouterr()
        assert told.out == "w0 w1 "
        assert "ENGINE_DEAD" in told.err

    def test_a_refused_request_names_its_fields(self, capsys: pytest.CaptureFixture[str]) -> None:
        """On stderr, one line each; status 1."""
        end = End(CODES.INVALID_ARGUMENT, violations=(("sampling.top_p", "must be in [0, 1]"), ("text", "too long")))
        with FakeServer(Attempt(0, end)) as server:
            assert run(server, "generate", "x", "--top-p", "7") == status.FAILED
        told = capsys.readouterr()
        assert told.out == ""
        assert "  sampling.top_p: must be in [0, 1]\n  text: too long\n" in told.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--temperature", "warm"],
            ["--no-such-flag"],
            ["--seed", str(2**64)],
            ["--timeout", "0"],
            ["--tls-cert", "c"],
        ],
    )
    def test_wrong_flags(self, arguments: list[str]) -> None:
        """Status 64, before any call."""
        with FakeServer() as server:
            try:
                code = run(server, "generate", "x", *arguments)
            except SystemExit as ended:
                code = ended.code  # type: ignore[assignment]
        assert code == status.USAGE
        assert server.num_calls == 0

    @pytest.mark.slow
    def test_no_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Told within moments, though resume is on: there is nothing to carry yet."""
        with FakeServer() as gone:
            pass
        assert run(gone, "generate", "x") == status.UNREACHABLE
        assert "UNAVAILABLE" in capsys.readouterr().err

    def test_a_token_file(self, tmp_path: Path) -> None:
        """Its one token goes with the call; a file with something else is refused."""
        path = tmp_path / "token"
        path.write_text("secret\n")
        with FakeServer() as server:
            assert run(server, "generate", "x", "--token-file", str(path)) == status.DONE
            assert server.metadata[0]["authorization"] == "Bearer secret"
            for text in ("", "two words", "line\nline"):
                path.write_text(text)
                assert run(server, "generate", "x", "--token-file", str(path)) == status.USAGE
        assert server.num_calls == 1

    @pytest.mark.slow
    def test_nobody_reads(self) -> None:
        """`emberline generate | head -1` ends without a traceback."""
        with FakeServer(Attempt(3, hang=True)) as server:
            command = [SCRIPT, "generate", "x", "--address", server.address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.read(3)
            process.stdout.close()
            server.left.set()  # more is coming
            _, error = process.communicate(timeout=LIMIT_S)
        assert b"Traceback" not in error
        assert process.returncode != 0


class TestChat:
    def test_turns_build_on_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each request has the whole conversation; /reset begins anew, /exit ends; empty lines are none."""
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
        with FakeServer() as server:
            assert run(server, "generate", "--chat", "--system", "be brief") == status.DONE
        said = [[(turn.role, turn.content) for turn in request.chat.messages] for request in server.requests]
        system = ("system", "be brief")
        assert said == [
            [system, ("user", "one")],
            [system, ("user", "one"), ("assistant", TEN_WORDS), ("user", "two")],
            [system, ("user", "three")],
        ]

    def test_one_turn(self, capsys: pytest.CaptureFixture[str]) -> None:
        """With a prompt it answers and ends."""
        with FakeServer() as server:
            assert run(server, "generate", "--chat", "hello") == status.DONE
        assert [turn.content for turn in server.requests[0].chat.messages] == ["hello"]
        assert capsys.readouterr().out == TEN_WORDS

    def test_a_failed_turn_is_not_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The conversation goes on without it; two turns of one speaker would be none."""
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
        with FakeServer(Attempt(0, End(CODES.INTERNAL))) as server:
            assert run(server, "generate", "--chat") == status.DONE
        assert [turn.content for turn in server.requests[1].chat.messages] == ["two"]

    @pytest.mark.slow
    def test_ctrl_c_stops_the_answer_alone(self) -> None:
        """In a terminal: the call is cancelled, what was said of it is remembered, and the next turn is asked. What the
        model says cannot steer the terminal.
        """
        ours, theirs = pty.openpty()
        with FakeServer(Attempt(3, hang=True)) as server:
            command = [SCRIPT, "generate", "--chat", "--address", server.address]
            process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
            os.close(theirs)
            screen = _Screen(ours)
            screen.expect("> ")
            os.write(ours, b"one\n")
            screen.expect("w1 ")
            process.send_signal(signal.SIGINT)
            screen.expect("(stopped)")
            assert server.left.wait(LIMIT_S)
            os.write(ours, b"two\n")
            screen.expect("w9 ")
            os.write(ours, b"/exit\n")
            assert process.wait(LIMIT_S) == status.DONE
        os.close(ours)
        said = [(turn.role, turn.content) for turn in server.requests[1].chat.messages]
        assert said == [("user", "one"), ("assistant", "w0 w1 "), ("user", "two")]


class _Screen:
    """What a terminal shows, read until what is wanted is there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = ""

    def expect(self, wanted: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while wanted not in self._text:
            assert time.monotonic() < deadline_s, self._text
            self._text += os.read(self._descriptor, 4096).decode()
        self._text = self._text.partition(wanted)[2]


class TestHealth:
    def test_statuses(self, capsys: pytest.CaptureFixture[str]) -> None:
        """0 serving, 1 not, or unknown, 2 unreachable; the state on stdout."""
        with FakeServer() as server:
            assert run(server, "health") == 0
            server.set_serving(False)
            assert run(server, "health") == 1
            assert run(server, "health", "no-such-service") == 1
            assert run(server, "health", "") == 0
        assert capsys.readouterr().out.split() == ["SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", "SERVING"]
        assert run(server, "health", "--timeout", "1") == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert "UNAVAILABLE" in told.err

    @pytest.mark.slow
    def test_watch_until_interrupted(self) -> None:
        """Each change on a line of its own; Ctrl-C ends it with the last one's status."""
        with FakeServer() as server:
            command = [SCRIPT, "health", "--watch", "--address", server.address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "SERVING\n"
            server.set_serving(False)
            assert process.stdout.readline() == "NOT_SERVING\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == status.FAILED
            process.stdout.close()

    @pytest.mark.slow
    def test_watch_until_the_servers_end(self) -> None:
        """A server that goes away is unreachable."""
        with FakeServer() as server:
            command = [SCRIPT, "health", "--watch", "--address", server.address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "SERVING\n"
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == status.UNREACHABLE
