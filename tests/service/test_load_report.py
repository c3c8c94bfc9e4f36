"""The load that goes with the end of each call, decoded as another implementation would."""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path
from typing import Any

import grpc
import hpack
from google.protobuf.message import Message

from service.load_report import METADATA_KEY, RATE_WINDOW_S, OrcaLoadReport, Rates
from service.totals import Totals
from tests.e2e import http2
from tests.service.front_end import request, running
from tests.service.support import HANG_S, CapturedLogs

FOREIGN = bytes.fromhex(
    "09000000000000e83f11000000000000c03f22110a06746f6b656e73110000000000001c402a130a086b765f636163686511000000000000e03f"
    "31000000000000044039000000000000e03f42120a0777616974696e6711000000000000084049000000000000d03f"
)
"""Made with the published stubs (xds-protos 1.85.0): see `test_the_message_is_the_published_one`."""
NUMBERS = {1: "cpu_utilization", 2: "mem_utilization", 6: "rps_fractional", 7: "eps", 9: "application_utilization"}
MAPS = {4: "request_cost", 5: "utilization", 8: "named_metrics"}


def decode(data: bytes) -> dict[str, Any]:
    """By the wire format and the published field numbers alone: fixed64 doubles, and map entries of short strings."""
    report: dict[str, Any] = {}
    at = 0
    while at < len(data):
        number, wire_type = data[at] >> 3, data[at] & 7
        at += 1
        if wire_type == 1:
            report[NUMBERS[number]] = struct.unpack_from("<d", data, at)[0]
            at += 8
        else:
            assert wire_type == 2
            entry, at = data[at + 1 : at + 1 + data[at]], at + 1 + data[at]
            assert entry[0] == 0x0A
            key = entry[2 : 2 + entry[1]].decode()
            rest = entry[2 + entry[1] :]
            value = struct.unpack("<d", rest[1:])[0] if rest else 0.0
            report.setdefault(MAPS[number], {})[key] = value
    return report


async def call(address: str, method: str, message: Message) -> list[dict[str, str]]:
    """The header blocks of the answer, as they are on the wire: a gRPC client keeps the report to itself."""
    host, _, port = address.rpartition(":")
    path = f"/emberline.v1.InferenceService/{method}"
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    body = message.SerializeToString()
    decoder, blocks = hpack.Decoder(), []
    async with asyncio.timeout(HANG_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        headers = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, hpack.Encoder().encode(fields))
        data = http2.frame(http2.DATA, http2.END_STREAM, 1, struct.pack(">BI", 0, len(body)) + body)
        writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + headers + data)
        is_over = False
        while not is_over:
            head = await reader.readexactly(http2.FRAME_HEADER.size)
            high, low, kind, flags, stream_id = http2.FRAME_HEADER.unpack(head)
            payload = await reader.readexactly(high << 16 | low)
            if kind == http2.HEADERS:
                assert flags & http2.END_HEADERS
                blocks.append({str(key): str(value) for key, value in decoder.decode(payload)})
            is_over = stream_id == 1 and bool(flags & http2.END_STREAM)
        writer.close()
        await writer.wait_closed()
    return blocks


def report_of(trailers: dict[str, str]) -> dict[str, Any]:
    text = trailers[METADATA_KEY]
    return decode(base64.b64decode(text + "=" * (-len(text) % 4)))


def test_the_message_is_the_published_one() -> None:
    """What the published stubs encode, ours reads, and encodes to the same bytes: names, numbers and types agree."""
    report = OrcaLoadReport.FromString(FOREIGN)
    assert report.SerializeToString(deterministic=True) == FOREIGN
    assert decode(FOREIGN) == {
        "cpu_utilization": 0.75,
        "mem_utilization": 0.125,
        "rps_fractional": 2.5,
        "eps": 0.5,
        "application_utilization": 0.25,
        "utilization": {"kv_cache": 0.5},
        "named_metrics": {"waiting": 3.0},
        "request_cost": {"tokens": 7.0},
    }
    assert report.utilization["kv_cache"] == 0.5


def test_rates_are_of_the_last_while() -> None:
    """A burst counts for the window and no longer; the first second does not make a rate of its first call."""
    now_s, totals = 100.0, Totals()
    rates = Rates(lambda: now_s, totals)
    totals.num_finished_calls, totals.num_failed_calls = 1, 1
    assert rates.per_s() == (1, 1)
    for _ in range(10):
        now_s += 1
        totals.num_finished_calls += 5
        rates.per_s()
    assert rates.per_s() == (5.1, 0.1)
    for _ in range(int(RATE_WINDOW_S) + 1):
        now_s += 1
        rates.per_s()
    assert rates.per_s() == (0, 0)


async def test_every_answer_tells_the_load(model: Path, log: CapturedLogs) -> None:
    """Streams, whole answers and refusals have it in their trailers, and nowhere before: headers come with the first
    message still. What runs beside the call is in it.
    """
    async with running(model, "--max-num-seqs", "4") as run:
        busy = [run.generate(1, n, max_tokens=4000) for n in range(2)]
        for one in busy:
            await one.read()
        headers, trailers = await call(run.server.address, "Generate", request(1, 2, max_tokens=5))
        assert METADATA_KEY not in headers
        assert trailers["grpc-status"] == "0"
        report = report_of(trailers)
        assert report["application_utilization"] >= 0.5
        assert report["named_metrics"]["running"] >= 2
        assert report["named_metrics"]["engines_serving"] == 1
        assert 0 < report["utilization"]["kv_cache"] <= 1
        assert report["rps_fractional"] > 0
        headers, trailers = await call(run.server.address, "Complete", request(1, 2, max_tokens=5))
        assert METADATA_KEY not in headers
        assert report_of(trailers)["rps_fractional"] > report["rps_fractional"]
        (trailers,) = await call(run.server.address, "Generate", request(1, 2, model="other"))
        assert trailers["grpc-status"] == str(grpc.StatusCode.NOT_FOUND.value[0])
        assert "rps_fractional" in report_of(trailers)
        assert "grpc-status-details-bin" in trailers
        for one in busy:
            one.cancel()


async def test_an_idle_server_has_a_weight(model: Path, log: CapturedLogs) -> None:
    """Balancers leave out a server whose utilization is zero: the call that is just over counts as one."""
    async with running(model, "--max-num-seqs", "4") as run:
        _, trailers = await call(run.server.address, "Generate", request(1, 2, max_tokens=5))
        assert report_of(trailers)["application_utilization"] == 0.25


async def test_a_report_that_cannot_be_made_costs_no_call(model: Path, log: CapturedLogs) -> None:
    """The call ends OK without it; that is logged once."""
    async with running(model) as run:
        accounts = run.server._backend.accounts

        def fail() -> Any:
            raise RuntimeError("a bug")

        accounts._load_metadata = fail
        for _ in range(3):
            _, trailers = await call(run.server.address, "Generate", request(1, 2, max_tokens=5))
            assert trailers["grpc-status"] == "0"
            assert METADATA_KEY not in trailers
    (record,) = log.of("account not kept")
    assert record["part"] == "load report"
    assert len(log.of("request finished")) == 3
