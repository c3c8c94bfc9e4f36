"""What the person on call sees of a real server: scrapes, dashboards and alerts over them, traces, a line per call."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.collector import Collector
from tests.e2e.harness import ROOT, ReflectionClient, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CANARY = "xylophone quartz"
INJECTED = ROOT / "scripts" / "fault_suite" / "injected"
DASHBOARD = ROOT / "deploy" / "grafana" / "emberline.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
SERVER_SPAN = "emberline.v1.InferenceService/Generate"
UP = "up"
"""What Prometheus itself makes of each scrape."""
LABELS_OF_TARGETS = {"job", "instance"}


@dataclass
class House:
    server: Server
    client: ReflectionClient
    collector: Collector
    triggers: Path

    def families(self) -> list[Any]:
        """A scrape, by Prometheus's own parser."""
        address = self.server.events("serving")[0]["metrics_address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))

    def samples(self) -> dict[str, float]:
        """The sum over all labels, by name."""
        sums: dict[str, float] = {}
        for family in self.families():
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One server with all of it on; faults can be put into its front end."""
    triggers = tmp_path_factory.mktemp("triggers")
    env = {
        "PYTHONPATH": str(INJECTED),
        "CHAOS_FOLDER": str(triggers),
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_SERVICE_NAME": "emberline-test",
    }
    with (
        Collector() as collector,
        Server(metrics_port=0, otlp_endpoint=collector.endpoint, on_engine_death="replay", env=env) as server,
        ReflectionClient(server.address) as client,
    ):
        house = House(server, client, collector, triggers)
        client.generate(text=CANARY, stopping={"max_tokens": 4}).expect_ok()
        yield house


def traceparent(number: int) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{number:032x}-{1:016x}-01"),)


# -------------------------------------------------------------------------------------------- dashboards and alerts


def selectors(query: str) -> list[tuple[str, set[str]]]:
    """Names and labels that a query asks for, by a parser of the query language."""
    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None, f"without a name: {query}"
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found, f"nothing is asked for: {query}"
    return found


def known(families: list[Any]) -> dict[str, set[str]]:
    """Label names by what may be queried: all sample names, and the names of counters that have not counted yet."""
    labels: dict[str, set[str]] = {}
    for family in families:
        labels.setdefault(family.name + "_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_the_dashboard_asks_for_what_there_is(house: House) -> None:
    """Each panel's query is valid PromQL over metrics and labels of a real scrape; panels have ids of their own and lie
    on Grafana's grid without overlap; the variables are those that queries use.
    """
    dashboard = json.loads(DASHBOARD.read_text())
    labels = known(house.families())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 15
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    for query in queries:
        assert set(re.findall(r"\$(\w+)", query)) <= variables | {"__rate_interval"}
        for name, asked in selectors(query.replace("$__rate_interval", "1m")):
            assert name in labels, query
            assert asked <= labels[name] | LABELS_OF_TARGETS, query
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["refId"]
            assert target["datasource"]["uid"] == "${datasource}"
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["uid"]
    assert dashboard["title"]


def test_the_alerts_ask_for_what_there_is(house: House) -> None:
    """Each rule has what Prometheus wants of it, its query is valid, and so are the metrics and labels in it; every one
    says how grave it is and what it means.
    """
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    labels = known(house.families()) | {UP: LABELS_OF_TARGETS}
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 8
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        for name, asked in selectors(rule["expr"]):
            assert name in labels, rule["alert"]
            assert asked <= labels[name] | LABELS_OF_TARGETS, rule["alert"]


# ------------------------------------------------------------------------------------------------------------ metrics


def test_a_scrape_counts_what_was_served(house: House) -> None:
    """A call's tokens, its prefill and its steps show in the next scrape; a second call of the same prompt hits the
    prefix cache.
    """
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    before = house.samples()
    for _ in range(2):
        house.client.generate(text=prompt, sampling={"temperature": 0}, stopping={"max_tokens": 8}).expect_ok()
    after = house.samples()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["emberline_requests_total"] == 2
    assert grown["emberline_generated_tokens_total"] == grown["emberline_request_output_tokens_sum"] == 16
    assert grown["emberline_time_to_first_token_seconds_count"] == 2
    assert grown["emberline_inter_token_latency_seconds_count"] == 14
    assert grown["emberline_prefix_cache_query_tokens_total"] == grown["emberline_request_prompt_tokens_sum"]
    assert grown["emberline_prefix_cache_hit_tokens_total"] > 100
    assert grown["emberline_engine_step_duration_seconds_count"] >= 16
    assert grown["emberline_engine_step_sequences_sum"] >= 16
    assert grown["emberline_engine_step_tokens_sum"] > grown["emberline_engine_step_sequences_sum"]
    assert grown["emberline_engine_step_duration_seconds_sum"] > 0
    phases = sum(grown[f"emberline_request_{phase}_seconds_sum"] for phase in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(grown["emberline_request_duration_seconds_sum"])


def test_a_metric_that_raises_reaches_no_caller(house: House) -> None:
    """In the real process: the stream is served, one line tells the failure, and the next scrape counts it."""
    armed = house.triggers / "armed"
    armed.write_text("raise")
    armed.rename(house.triggers / "once-recording")
    house.client.generate(text="Hello", stopping={"max_tokens": 4}).expect_ok()
    assert (house.triggers / "done-recording").exists()
    assert house.samples()["emberline_metric_failures_total"] == 1
    (record,) = house.server.events("metric failed")
    assert record["exception_type"].endswith("InjectedError")


# ------------------------------------------------------------------------------------------------------------- traces


def test_a_replayed_call_is_one_trace_and_one_line(house: House) -> None:
    """A stream whose engine is killed: the collector has its server span in the caller's trace with the death and the
    replay, and its phases below it; the log has one line with the same ids, and metrics have counted all of it.
    """
    before = house.samples()
    call = house.client.stream(
        text=CANARY,
        request_id="observed",
        sampling={"temperature": 0},
        stopping={"max_tokens": 120, "ignore_eos": True},
        metadata=traceparent(0xABC),
    )
    next(iter(call))
    os.kill(house.server.engine_pid(), signal.SIGKILL)
    for _ in call:
        pass
    spans = {span.name: span for span in house.collector.wait_for(f"{0xABC:032x}", 4)}
    assert set(spans) == {SERVER_SPAN, "queue", "prefill", "decode"}
    server = spans[SERVER_SPAN]
    death = house.server.wait_for_log("fatal error")
    assert server.events[0] == ("engine died", {"emberline.death_id": death["death_id"]})
    assert server.events[1][0] == "stream goes on"
    assert server.parent_id == f"{1:016x}"
    assert server.resource["service.name"] == "emberline-test"
    assert server.attributes["gen_ai.usage.output_tokens"] == 120
    lines = [line for line in house.server.events("request finished") if line["request_id"] == "observed"]
    (line,) = lines
    assert (line["trace_id"], line["status"], line["num_output_tokens"]) == (f"{0xABC:032x}", "OK", 120)
    assert (line["num_attempts"], line["num_deaths"]) == (2, 1)
    grown = {name: value - before.get(name, 0.0) for name, value in house.samples().items()}
    assert grown["emberline_engine_deaths_total"] == 1
    assert grown["emberline_engine_restarts_total"] == 1
    assert grown["emberline_stream_replays_total"] == 1


def test_scrapes_do_not_hurt_streams(house: House) -> None:
    """Scraped without a pause by two, the server serves, and every scrape is whole."""
    over = threading.Event()
    scraped: list[int] = []

    def scrape() -> None:
        while not over.is_set():
            scraped.append(len(house.families()))

    threads = [threading.Thread(target=scrape, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        house.client.generate(
            text="Hello", stopping={"max_tokens": 24, "ignore_eos": True}, sampling={"temperature": 0}
        ).expect_ok()
        deadline = time.monotonic() + 60
        while len(scraped) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert len(set(scraped)) == 1


def test_no_text_of_a_caller_is_anywhere(house: House) -> None:
    """Neither in a scrape, nor in a span, nor in the log: the prompts of this module's calls, all of them long over."""
    scrape = "".join(f"{sample}" for family in house.families() for sample in family.samples)
    assert CANARY not in scrape
    assert CANARY not in repr(house.collector.spans)
    assert CANARY not in house.server.raw_stderr
