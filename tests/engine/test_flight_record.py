"""scheduler/flight_record.py: what the front end reads is what the engine last did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from scheduler.flight_record import NUM_REQUESTS_MAX, NUM_STEPS, SIZE_BYTES, FlightReader, FlightWriter, StepShape
from scheduler.messages import Phase


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE_BYTES)
    yield fd
    os.close(fd)


def shape(step_id: int) -> StepShape:
    return StepShape(step_id, num_seqs=3, num_batched_tokens=130, num_new=1, num_preempted=0, max_query_len=128)


def test_an_unwritten_record_reads_as_loading(fd: int) -> None:
    """Before the engine's first store the record says LOADING and has no steps."""
    record = FlightReader(fd).read()
    assert (record.phase, record.steps, record.batch) == (Phase.LOADING, (), "")


def test_the_last_steps_are_kept_newest_first(fd: int) -> None:
    """The ring holds the last NUM_STEPS shapes, however many steps were made."""
    writer, reader = FlightWriter(fd), FlightReader(fd)
    for step_id in range(1, 3 * NUM_STEPS):
        writer.enter(Phase.EXECUTE, now_ns=step_id, step_id=step_id, num_messages_received=5)
        writer.record(shape(step_id), (1, 2, 3))
    record = reader.read()
    newest = 3 * NUM_STEPS - 1
    assert (record.phase, record.since_monotonic_ns, record.step_id) == (Phase.EXECUTE, newest, newest)
    assert record.num_messages_received == 5
    assert [s.step_id for s in record.steps] == list(range(newest, newest - NUM_STEPS, -1))
    assert "num_batched_tokens=130" in record.batch


def test_the_record_outlives_a_writer_killed_by_sigkill(fd: int) -> None:
    """After SIGKILL in the middle of a step the reader knows the step, its phase, its shape and whose it is."""
    code = (
        "import sys, time\n"
        "from scheduler.flight_record import FlightWriter, StepShape\n"
        "from scheduler.messages import Phase\n"
        "writer = FlightWriter(int(sys.argv[1]))\n"
        "writer.record(StepShape(40, 3, 130, 1, 0, 128), (4, 5))\n"
        "writer.record(StepShape(41, 3, 130, 1, 0, 128), (4, 5, 2**63))\n"
        "writer.enter(Phase.EXECUTE, now_ns=7, step_id=41, num_messages_received=9)\n"
        "print('written', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        os.kill(child.pid, signal.SIGKILL)
    reader = FlightReader(fd)
    record = reader.read()
    assert (record.phase, record.step_id, record.num_messages_received) == (Phase.EXECUTE, 41, 9)
    assert record.steps == (shape(41), shape(40))
    assert reader.request_ids(41) == (4, 5, 2**63)


def test_the_requests_of_the_last_two_steps_are_known(fd: int) -> None:
    """Those of older steps, and of steps that were never made, are None and not somebody else's."""
    writer, reader = FlightWriter(fd), FlightReader(fd)
    assert [reader.request_ids(step_id) for step_id in range(3)] == [None, None, None]
    for step_id in range(1, 5):
        writer.record(shape(step_id), range(step_id))
    assert reader.request_ids(4) == (0, 1, 2, 3)
    assert reader.request_ids(3) == (0, 1, 2)
    assert [reader.request_ids(step_id) for step_id in (0, 1, 2, 5)] == [None] * 4


def test_a_batch_that_stays_the_same_is_known_at_every_step(fd: int) -> None:
    """The very same list of requests, handed in again, belongs to the new step; another one of equal length is told."""
    writer, reader = FlightWriter(fd), FlightReader(fd)
    same = (7, 8)
    for step_id in range(1, 8):
        writer.record(shape(step_id), same)
        assert reader.request_ids(step_id) == same
    writer.record(shape(8), (8, 9))
    assert (reader.request_ids(7), reader.request_ids(8)) == ((7, 8), (8, 9))
    writer.record(shape(9), same)
    assert (reader.request_ids(8), reader.request_ids(9)) == ((8, 9), (7, 8))


def test_more_requests_than_there_is_room_for_are_cut(fd: int) -> None:
    """A step of more than NUM_REQUESTS_MAX requests is recorded by its first ones; nothing is written past the end."""
    writer, reader = FlightWriter(fd), FlightReader(fd)
    for step_id in (1, 2):
        writer.record(shape(step_id), range(NUM_REQUESTS_MAX + 100))
        assert reader.request_ids(step_id) == tuple(range(NUM_REQUESTS_MAX))


@pytest.mark.parametrize("step_id", [1, 2])
def test_requests_that_were_half_written_are_not_told(fd: int, step_id: int) -> None:
    """A writer that died while it wrote them left a table without a step; guesses would blame the innocent."""

    class Interrupted(tuple[int, ...]):
        """Cannot be read: the writer gets no further."""

        __slots__ = ()

        def __getitem__(self, key: object) -> tuple[int, ...]:  # type: ignore[override]
            raise KeyboardInterrupt

    writer, reader = FlightWriter(fd), FlightReader(fd)
    writer.record(shape(step_id), (1, 2, 3))
    with pytest.raises(KeyboardInterrupt):
        writer.record(shape(step_id + 2), Interrupted((4, 5)))
    assert reader.request_ids(step_id) is None
    assert reader.request_ids(step_id + 2) is None


def test_a_writer_killed_in_mid_store_does_not_hang_the_reader(fd: int) -> None:
    """A sequence counter left odd is read as it is."""
    os.pwrite(fd, (1).to_bytes(8, "little") + int(Phase.SEND).to_bytes(8, "little"), 0)
    assert FlightReader(fd).read().phase is Phase.SEND


def test_a_page_that_was_scribbled_on_is_read_all_the_same(fd: int) -> None:
    """An engine whose memory went wrong may have written anything here; its death is told nevertheless, and a phase
    that is none counts as one that the hang watch does not wait for in vain.
    """
    os.pwrite(fd, b"\xff" * SIZE_BYTES, 0)
    record = FlightReader(fd).read()
    assert record.phase is Phase.EXECUTE
    assert len(record.steps) == NUM_STEPS
    assert FlightReader(fd).request_ids(record.step_id) is None
