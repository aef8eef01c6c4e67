"""The metrics, read by prometheus-client's own parser."""

from __future__ import annotations

import json
import random
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastgen.runtime.metrics import Histogram, Metrics
from fastgen.serving.monitoring.prometheus import HELP, ServerMetrics
from tests.runtime.histories import random_history

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(server: ServerMetrics) -> Samples:
    """Returns every sample, by name and labels."""
    families = text_string_to_metric_families(server.text().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def lived(seed: int) -> Metrics:
    history = random_history(random.Random(seed), failures=0.05, prefix_caching=True)
    history.live(60)
    return history.engine.metrics.snapshot()


@pytest.fixture
def server() -> ServerMetrics:
    server = ServerMetrics(lambda: True)
    # touch each counter with labels, as serving does
    server.refused("ttft_slo")
    server.http_request("/v1/completions", "POST", 200)
    return server


def check_histogram(found: Samples, name: str, expected: Histogram, **labels: str) -> None:
    total = 0
    for bound, count in zip((*map(float, expected.bounds), float("inf")), expected.counts, strict=True):
        total += count
        bucket = [
            value
            for (each, of), value in found.items()
            if each == f"{name}_bucket" and dict(of) | labels == dict(of) and float(dict(of)["le"]) == bound
        ]
        assert bucket == [total], f"{name}: buckets hold all values up to {bound}"
    assert found[key(f"{name}_count", **labels)] == expected.count
    assert found[key(f"{name}_sum", **labels)] == pytest.approx(expected.sum)


def test_every_number_of_the_engine_is_exported_as_it_is(server: ServerMetrics) -> None:
    metrics = lived(1)
    server.observe(metrics)
    found = read(server)
    for field in fields(Metrics):
        value = getattr(metrics, field.name)
        if isinstance(value, int):
            assert found[key(f"fastgen_{field.name}")] == value
        elif isinstance(value, Histogram):
            check_histogram(found, f"fastgen_{field.name}", value)
    assert metrics.step_seconds
    for size, histogram in metrics.step_seconds.items():
        check_histogram(found, "fastgen_step_seconds", histogram, size=str(size))
    assert metrics.sequences_finished_total
    for reason, number in metrics.sequences_finished_total.items():
        assert found[key("fastgen_sequences_finished_total", reason=reason)] == number
    assert set(HELP) == {field.name for field in fields(Metrics)}


def test_counters_go_on_over_a_restart_and_gauges_do_not(server: ServerMetrics) -> None:
    first, second = lived(1), lived(2)
    server.observe(first)
    before = read(server)
    server.engine_ended()
    between = read(server)
    server.observe(second)
    after = read(server)
    counters = [name for name in before if name[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    assert len(counters) > 100
    assert all(before[name] == between[name] for name in counters if "process" not in name[0])
    assert all(between[name] <= after[name] for name in counters)
    for field in fields(Metrics):
        if field.name.endswith("_total") and field.name != "sequences_finished_total":
            total = getattr(first, field.name) + getattr(second, field.name)
            assert after[key(f"fastgen_{field.name}")] == total
    for size in {*first.step_seconds, *second.step_seconds}:
        count = sum(each.step_seconds[size].count for each in (first, second) if size in each.step_seconds)
        assert after[key("fastgen_step_seconds_count", size=str(size))] == count
    assert between[key("fastgen_kv_blocks")] == 0
    assert after[key("fastgen_kv_blocks")] == second.kv_blocks


def test_many_restarts_add_up(server: ServerMetrics) -> None:
    lives = [lived(seed) for seed in range(4)]
    for metrics in lives:
        server.observe(metrics)
        server.engine_ended()
    assert read(server)[key("fastgen_requests_total")] == sum(metrics.requests_total for metrics in lives)


def test_an_engine_that_is_not_heard_for_a_while_is_counted_once(server: ServerMetrics) -> None:
    first, second = lived(1), lived(2)
    server.observe(first, "a")
    server.engine_away("a")
    away = read(server)
    assert away[key("fastgen_requests_total")] == first.requests_total
    assert (away[key("fastgen_kv_blocks")], server.replicas) == (0, {})
    server.observe(first, "a")  # it is heard again
    assert read(server)[key("fastgen_requests_total")] == first.requests_total
    assert read(server)[key("fastgen_kv_blocks")] == first.kv_blocks
    server.engine_away("a")
    server.engine_ended("a")
    server.observe(second, "a")
    assert read(server)[key("fastgen_requests_total")] == first.requests_total + second.requests_total


def test_answers_are_judged_by_the_papers_rule(server: ServerMetrics) -> None:
    server.answered(512, 0.9, [0.1, 0.1])
    server.answered(512, 1.1, [0.1, 0.1])
    server.answered(512, 0.9, [0.2, 0.2])
    found = read(server)
    good = {rate: found[key("fastgen_good_answers_total", tokens_per_s=str(rate))] for rate in (2, 4, 6)}
    assert good == {2: 2, 4: 2, 6: 1}
    assert found[key("fastgen_answers_total")] == found[key("fastgen_server_ttft_seconds_count")] == 3


def test_what_may_happen_is_counted_from_zero() -> None:
    """So that the first event shows as a change."""
    found = read(ServerMetrics(lambda: True))
    assert {found[key("fastgen_good_answers_total", tokens_per_s=rate)] for rate in ("2", "4", "6")} == {0}
    for reason in ("queued_requests", "ttft_slo", "unavailable"):
        assert found[key("fastgen_refused_total", reason=reason)] == 0


def test_the_servers_own_numbers(server: ServerMetrics) -> None:
    server.http_request("/v1/completions", "POST", 429)
    server.http_request("/v1/completions", "POST", 200)
    server.num_restarts = 1
    found = read(server)
    assert found[key("fastgen_http_requests_total", route="/v1/completions", method="POST", status="200")] == 2
    assert found[key("fastgen_http_requests_total", route="/v1/completions", method="POST", status="429")] == 1
    assert found[key("fastgen_refused_total", reason="ttft_slo")] == 1
    assert (found[key("fastgen_engine_restarts_total")], found[key("fastgen_up")]) == (1, 1)
    assert found[key("fastgen_server_process_open_fds")] > 0
    assert read(ServerMetrics(lambda: False))[key("fastgen_up")] == 0


def dashboard_expressions() -> list[str]:
    text = (Path(str(resources.files("fastgen.serving"))) / "monitoring" / "grafana" / "fastgen.json").read_text()
    panels = json.loads(text)["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(server: ServerMetrics) -> None:
    server.observe(lived(1))
    names: dict[str, set[str]] = {}
    for name, labels in read(server):
        names.setdefault(name, {"instance"}).update(dict(labels))
    asked = set()
    for expression in dashboard_expressions():
        used = re.findall(r"fastgen_\w+", expression)
        assert used, expression
        assert set(used) <= set(names), expression
        for by in re.findall(r"by \(([\w, ]+)\)", expression):
            assert set(by.split(", ")) <= names[used[0]], expression
        for name, matchers in re.findall(r"(fastgen_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", matchers)) <= names[name], expression
        asked |= set(used)
    assert {"fastgen_requests_running", "fastgen_requests_waiting", "fastgen_good_answers_total"} <= asked


def test_the_dashboard_takes_rates_of_what_counts_and_quantiles_of_histograms(server: ServerMetrics) -> None:
    server.observe(lived(1))
    families = text_string_to_metric_families(server.text().decode())
    kinds = {
        sample.name: (family.type, sample.name.removeprefix(family.name))
        for family in families
        for sample in family.samples
    }
    for expression in dashboard_expressions():
        rated = set(re.findall(r"rate\((fastgen_\w+)", expression))
        for name in re.findall(r"fastgen_\w+", expression):
            kind, suffix = kinds[name]
            if name in rated:
                assert kind == "counter" or suffix in ("_bucket", "_sum", "_count"), expression
                assert (suffix == "_bucket") == expression.startswith("histogram_quantile("), expression
                assert (suffix == "_bucket") == ("by (le)" in expression), expression
            else:
                assert kind == "gauge" or name == "fastgen_engine_restarts_total", expression
