"""Presets of the generator have the statistics that were published of their workloads."""

from dataclasses import replace
from statistics import mean, median

import pytest

from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from tests.traces.hit_ratio import prefix_hit_ratio


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_statistics(name: str) -> None:
    """Means and medians within a tenth, the hit ratio within four points, nothing longer than the
    longest.
    """
    published = PRESETS[name].published
    trace = generate(replace(PRESETS[name].settings, requests=8000), seed=3)
    inputs = [request.input_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]

    assert mean(inputs) == pytest.approx(published.input_mean, rel=0.1)
    assert mean(outputs) == pytest.approx(published.output_mean, rel=0.1)
    if published.input_p50 is not None:
        assert median(inputs) == pytest.approx(published.input_p50, rel=0.1)
    if published.output_p50 is not None:
        assert median(outputs) == pytest.approx(published.output_p50, rel=0.1)
    assert max(inputs) <= (published.input_max or max(inputs))
    assert max(outputs) <= (published.output_max or max(outputs))
    if published.requests_per_s is not None:
        assert len(inputs) / trace.requests[-1].arrival_s == pytest.approx(
            published.requests_per_s, rel=0.05
        )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_shares_what_its_source_shares(name: str) -> None:
    """The cache ratio of the Mooncake workloads; none where the source does not say that anything
    is shared.
    """
    trace = generate(replace(PRESETS[name].settings, requests=8000), seed=4)

    assert prefix_hit_ratio(trace) == pytest.approx(
        PRESETS[name].published.hit_ratio or 0.0, abs=0.04
    )
