"""Series of the proxy's own, as those of the library."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder

from kvrs.proxy.streams.stream_metrics import TallySeries

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
LABELS = st.sampled_from(["a", 'quoted "x"', "two\nlines", "back\\slash", "ü"])


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
        count.of(*values).value += amount
        level.of(*values).value -= amount
        (counter.labels(*values) if labels else counter).inc(amount)
        (gauge.labels(*values) if labels else gauge).dec(amount)
    encode, _ = choose_encoder(accept)

    assert encode(ours) == encode(theirs)
