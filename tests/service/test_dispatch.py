"""What becomes of streams when their engine dies: with real processes and made-up tokens, see `fake_engine.py`."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from scheduler.messages import Phase, SequenceStart, Submit
from service.blame import Blame
from service.errors import EngineDeadError, PoisonRequestError
from tests.service.fake_engine import Trigger, tokens_of
from tests.service.rig import collect, collect_all, error_of, rig
from tests.service.support import CapturedLogs, poisoned, submit, until


async def test_replayed_streams_go_on_where_they_were(log: CapturedLogs) -> None:
    """After a death in mid-stream every stream has exactly its tokens, none lost or repeated."""
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        streams = [run.generate(submit(n, n, 2 * n, max_tokens=60), replay=True) for n in range(1, 9)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await until(lambda: all(stream.entry.num_output_tokens >= 10 for stream in streams))
        os.kill(run.engine.pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [tokens_of((n, 2 * n), 60) for n in range(1, 9)]
        (record,) = log.of("fatal error")
        assert (record["num_streams_replayed"], record["num_streams_ended"]) == (8, 0)
        assert len(run.journal) == 0


async def test_each_sequence_of_a_replayed_stream_goes_on_where_it_was(log: CapturedLogs) -> None:
    """Of three sequences one has finished before the death: it is not computed again, and the others lose and repeat
    nothing, each under its own index."""
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        starts = (SequenceStart(0), SequenceStart(1, (3,) * 56), SequenceStart(2))
        stream = run.generate(replace(submit(1, 5, 6, max_tokens=60), sequences=starts), replay=True)
        outputs = []
        while not stream.entry.finished:
            outputs += await stream.next()
        os.kill(run.engine.pid, signal.SIGKILL)
        while len(stream.entry.finished) < 3:
            outputs += await stream.next()
        outputs += await stream.next()
        token_ids = {
            index: [token_id for output in outputs if output.index == index for token_id in output.new_token_ids]
            for index in range(3)
        }
        assert token_ids == {
            0: tokens_of((5, 6), 60, 0),
            1: tokens_of((5, 6), 60, 1)[56:],
            2: tokens_of((5, 6), 60, 2),
        }
        assert stream.entry.sent is not None
        assert [start.index for start in stream.entry.sent.sequences] == [0, 2]


async def test_a_stream_may_ask_for_replay_on_its_own(log: CapturedLogs) -> None:
    """Of two streams in the dying step the one goes on, the other ends and is not to be retried."""
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        saved = run.generate(submit(1, 3, max_tokens=60), replay=True)
        lost = run.generate(submit(2, 4, max_tokens=60))
        begun = [token_id for output in await saved.next() for token_id in output.new_token_ids]
        await lost.next()
        os.kill(run.engine.pid, signal.SIGKILL)
        error = await error_of(lost)
        assert isinstance(error, EngineDeadError)
        assert error.in_step
        assert begun + await collect(saved) == tokens_of((3,), 60)


async def test_replay_goes_to_another_replica_at_once(log: CapturedLogs) -> None:
    """With a second engine alive nobody waits for the first one's successor."""
    async with rig(2, flags={"step_s": 0.005}, max_restarts=0) as run:
        streams = [run.generate(submit(n, n, max_tokens=100), replay=True) for n in range(1, 9)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await until(lambda: all(stream.entry.num_output_tokens >= 5 for stream in streams))
        os.kill(run.engine.pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [tokens_of((n,), 100) for n in range(1, 9)]
        assert 0 < run.deaths[0].aftermath.num_replayed < 8


async def test_a_death_costs_one_replicas_share(log: CapturedLogs) -> None:
    """Streams of the other replica do not notice."""
    async with rig(2, flags={"step_s": 0.005}, max_restarts=9) as run:
        streams = [run.generate(submit(n, n, max_tokens=100)) for n in range(1, 9)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await until(lambda: all(stream.entry.num_output_tokens >= 5 for stream in streams))
        os.kill(run.engine.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        dead = [result for result in results if isinstance(result, EngineDeadError)]
        assert 0 < len(dead) < 8
        assert all(isinstance(r, EngineDeadError) or r == tokens_of((n,), 100) for n, r in enumerate(results, 1))


@pytest.mark.parametrize("replay", [False, True])
async def test_one_poison_kills_twice_at_most(replay: bool, log: CapturedLogs) -> None:
    """Resubmitted five times beside an innocent: its first death makes it a suspect, its second, alone, the killer;
    then it is refused. The innocent on replay loses nothing."""
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        innocent = run.generate(submit(1, 3, max_tokens=800), replay=True)
        task = asyncio.create_task(collect(innocent))
        await until(lambda: innocent.entry.num_output_tokens > 3)
        errors: list[Exception] = []
        for number in range(2, 7):
            await run.all_serving()
            try:
                errors.append(await error_of(run.generate(poisoned(number, Trigger.SIGKILL), replay=replay)))
            except PoisonRequestError as error:
                errors.append(error)
        assert len(run.deaths) <= 2
        assert isinstance(errors[-1], PoisonRequestError)
        assert not any(isinstance(error, EngineDeadError) for error in errors[1:])
        assert run.deaths[-1].aftermath.killer_id is not None
        assert await task == tokens_of((3,), 800)


async def test_five_of_the_same_poison_at_once(log: CapturedLogs) -> None:
    """Twins in the same step: one of them is convicted, the others are refused unsent."""
    async with rig(max_restarts=9) as run:
        streams = [run.generate(poisoned(number, Trigger.SIGKILL), replay=True) for number in range(1, 6)]
        errors = await asyncio.gather(*(error_of(stream) for stream in streams))
        assert len(run.deaths) == 2
        for error in errors:
            assert isinstance(error, PoisonRequestError)
            assert error.death_id == run.deaths[-1].death_id


async def test_copies_of_a_suspect_wait_for_the_one_on_trial(log: CapturedLogs) -> None:
    """Those that come back run alone one for all, not one after another: once it is past the place, nothing is held
    against the others. If its caller leaves, the next one is on trial.
    """
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        first = run.generate(submit(1, 3, max_tokens=40))
        await until(lambda: first.entry.num_output_tokens >= 10)
        os.kill(run.engine.pid, signal.SIGKILL)
        await error_of(first)
        await run.all_serving()
        copies = [run.generate(submit(number, 3, max_tokens=40)) for number in range(2, 6)]
        other = run.generate(submit(6, 4, max_tokens=40))
        assert run.dispatcher.num_waiting == 3
        assert other.entry.sent is not None
        copies[0].close()
        assert run.dispatcher.num_waiting == 2
        assert await collect_all(copies[1:]) == [tokens_of((3,), 40)] * 3
        assert await collect(other) == tokens_of((4,), 40)
        places = [copy.entry.sent.alone_until for copy in copies if copy.entry.sent is not None]
        assert [place > 0 for place in places] == [True, True, False, False]
        assert len(run.deaths) == 1


async def test_a_stream_alone_is_no_killer_by_that(log: CapturedLogs) -> None:
    """The only stream there is goes on after a kill from outside, twice."""
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        stream = run.generate(submit(1, 3, max_tokens=200), replay=True)
        task = asyncio.create_task(collect(stream))
        for num_tokens in (5, 60):
            await until(lambda n=num_tokens: stream.entry.num_output_tokens > n)
            os.kill(run.engine.pid, signal.SIGKILL)
            await until(lambda: not run.replica.is_serving)
            await run.all_serving()
        assert await task == tokens_of((3,), 200)
        assert len(run.deaths) == 2


async def test_whatever_an_engine_may_have_taken_is_suspect(log: CapturedLogs) -> None:
    """An engine that dies while it takes messages has not told how many: one of those just sent may be the killer."""
    async with rig(flags={"step_s": 30}, max_restarts=9) as run:
        assert run.engine.process is not None
        flight = run.engine.process.flight
        streams = [run.generate(submit(1))]
        await streams[0].next()
        await until(lambda: flight.read().phase is Phase.DRAIN)
        os.kill(run.engine.pid, signal.SIGSTOP)
        streams.append(run.generate(submit(2)))
        os.kill(run.engine.pid, signal.SIGKILL)
        errors = await asyncio.gather(*(error_of(stream) for stream in streams))
        assert [isinstance(error, EngineDeadError) and error.in_step for error in errors] == [True, True]


async def test_suspicion_costs_no_look_per_token(log: CapturedLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspect is cleared when it gets past its place and when it ends, not at each token in between: that would be a
    digest of its prompt for every token of every stream that was in a dying step."""
    looks: list[int] = []
    cleared = Blame.cleared

    def count(self: Blame, request: Submit) -> None:
        looks.append(request.request_id)
        cleared(self, request)

    monkeypatch.setattr(Blame, "cleared", count)
    async with rig(flags={"step_s": 0.005}, max_restarts=9) as run:
        stream = run.generate(submit(1, 3, max_tokens=60), replay=True)
        task = asyncio.create_task(collect(stream))
        await until(lambda: stream.entry.num_output_tokens > 5)
        os.kill(run.engine.pid, signal.SIGKILL)
        assert await task == tokens_of((3,), 60)
        assert looks == [1, 1]


async def test_streams_that_wait_are_ended_when_nobody_comes(log: CapturedLogs) -> None:
    """A replayed stream whose last hope is gone ends with the death."""
    async with rig(flags={"step_s": 0.005}, max_restarts=1) as run:
        streams = [run.generate(submit(n, n, max_tokens=4000), replay=True) for n in (1, 2)]
        tasks = [asyncio.create_task(error_of(stream)) for stream in streams]
        for num_tokens in (5, 40):
            await until(lambda n=num_tokens: all(stream.entry.num_output_tokens > n for stream in streams))
            os.kill(run.engine.pid, signal.SIGKILL)
            await until(lambda: not run.replica.is_serving)
            if num_tokens == 5:
                await run.all_serving()
        assert all(isinstance(error, EngineDeadError) for error in await asyncio.gather(*tasks))
        await run.given_up()
