"""Metrics as text, of which only what has changed is rendered again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.exposition import choose_encoder

from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.proxy.api.exposition import Exposition
from kvrs.proxy.streams.metrics import DeathCause, Metrics
from kvrs.proxy.streams.stream_metrics import DurationSeries, TallySeries

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
LABELS = st.sampled_from(["a", 'quoted "x"', "two\nlines", "back\\slash", "ü"])
NUMBERS = st.floats(allow_nan=False)


@given(st.lists(st.tuples(LABELS, NUMBERS, st.booleans()), max_size=12))
@pytest.mark.parametrize("accept", [OPEN, "", "text/plain"])
def test_text_is_that_of_the_library_after_every_change(
    accept: str, steps: list[tuple[str, float, bool]]
) -> None:
    """Series that come, change and go; both formats of one registry, in turns."""
    registry = CollectorRegistry()
    gauge = Gauge("load_ratio", 'Help "of" it.\nTwo lines.', ["worker", "at"], registry=registry)
    counter = Counter("deaths", "Deaths.", ["worker"], registry=registry)
    Info("build", "Version.", registry=registry).info({"version": "1"})
    durations = DurationSeries(
        "wait_seconds", "Waits.", buckets=(0.5, 1.0), registry=registry, label="x", values=["y"]
    )
    encode, content_type = choose_encoder(accept)
    exposition = Exposition()
    for label, number, goes in steps:
        gauge.labels(label, "here").set(number)
        if goes:
            gauge.remove(label, "here")
            counter.labels(label).inc()
            durations.by_value["y"].observe(abs(number) if abs(number) < 1e9 else 1.0)
        exposition.render(registry, "")

        assert exposition.render(registry, accept) == (encode(registry), content_type)


@given(st.lists(st.tuples(LABELS, st.integers(1, 1 << 40)), max_size=12))
@pytest.mark.parametrize("labels", [(), ("worker",)], ids=["one", "labelled"])
@pytest.mark.parametrize("accept", [OPEN, ""], ids=["openmetrics", "text"])
def test_tallies_read_as_counters_and_gauges_of_the_library(
    accept: str, labels: Sequence[str], steps: list[tuple[str, int]]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count = TallySeries("deaths", "Deaths.", registry=ours, labels=labels)
    level = TallySeries("open", "Open.", registry=ours, labels=labels, is_counter=False)
    counter = Counter("deaths", "Deaths.", labels, registry=theirs)
    gauge = Gauge("open", "Open.", labels, registry=theirs)
    if not labels:
        count.of()
        level.of()
    for label, amount in steps:
        values = [label] * len(labels)
        count.of(*values).inc(amount)
        level.of(*values).inc(-amount)
        (counter.labels(*values) if labels else counter).inc(amount)
        (gauge.labels(*values) if labels else gauge).dec(amount)
    encode, content_type = choose_encoder(accept)

    assert encode(ours) == encode(theirs)
    assert Exposition().render(ours, accept) == (encode(theirs), content_type)


def test_the_metrics_of_a_proxy_are_rendered_as_by_the_library() -> None:
    """All of them, before and after events."""
    metrics = Metrics({InstanceId("d0"): Role.DECODE}, [InstanceId("agent-n0")])
    exposition = Exposition()
    encode, _ = choose_encoder(OPEN)

    for _ in range(3):
        metrics.worker_lost(InstanceId("d0"), DeathCause.SILENT, 0.5)
        metrics.loop_lag.observe(0.001)

        text, _ = exposition.render(metrics.registry, OPEN)

        own, theirs = (
            [line for line in each.splitlines() if not line.startswith((b"process_", b"python_gc"))]
            for each in (text, encode(metrics.registry))
        )
        assert own == theirs
