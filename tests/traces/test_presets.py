"""Presets of the generator have the statistics that were published of their workloads."""

from dataclasses import dataclass, replace
from statistics import mean, median

import pytest

from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from tests.traces.hit_ratio import prefix_hit_ratio


@dataclass(frozen=True, slots=True)
class Published:
    """Published statistics, in tokens; None: not published."""

    input_mean: float
    output_mean: float
    input_p50: float | None = None
    output_p50: float | None = None
    input_max: int | None = None
    output_max: int | None = None
    # Blocks of 512 tokens that an infinite prefix cache would have held; None: no sharing known.
    hit_ratio: float | None = None
    requests_per_s: float | None = None


PUBLISHED = {
    # Mooncake FAST'25, conversation_trace.jsonl.
    "mooncake-conversation": Published(12_035, 343, 6_909, 350, 126_195, 2_000, 0.366, 3.4),
    # vLLM (SOSP'23), figure 11: ShareGPT.
    "sharegpt": Published(161.31, 337.99),
    # AzureLLMInferenceTrace_conv.csv.
    "splitwise-conv": Published(1_155, 211, 1_020, 129, 14_050, 1_000, None, 5.53),
    # RaidServe, table 1: OpenThoughts-114k.
    "openthoughts": Published(422, 7_295, 352, 5_583, 7_633, 37_817),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_statistics(name: str) -> None:
    """Means and medians within a tenth, the hit ratio within four points, nothing longer than the
    longest.
    """
    published = PUBLISHED[name]
    trace = generate(replace(PRESETS[name], requests=8000), seed=3)
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
    trace = generate(replace(PRESETS[name], requests=8000), seed=4)

    assert prefix_hit_ratio(trace) == pytest.approx(PUBLISHED[name].hit_ratio or 0.0, abs=0.04)
