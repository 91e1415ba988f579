"""Generated traces look like the published one and are a function of their seed."""

from itertools import pairwise
from statistics import mean, median

import pytest

from kvrs_lab.traces.generator import GeneratorSettings, generate
from tests.traces.hit_ratio import prefix_hit_ratio


def test_the_defaults_come_close_to_mooncakes_conversation_trace() -> None:
    """Input mean 12,035 / p50 6,909 / max 126,195, output mean 343 / p50 350, 36.6 % prefix hits,
    3.4 requests/s.
    """
    trace = generate(GeneratorSettings(requests=12_000), seed=1)
    inputs = [request.input_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]

    assert mean(inputs) == pytest.approx(12_035, rel=0.1)
    assert median(inputs) == pytest.approx(6_909, rel=0.1)
    assert max(inputs) <= 126_195
    assert mean(outputs) == pytest.approx(343, rel=0.1)
    assert median(outputs) == pytest.approx(350, rel=0.1)
    assert prefix_hit_ratio(trace) == pytest.approx(0.366, abs=0.04)
    assert trace.requests[-1].arrival_s == pytest.approx(3_537, rel=0.05)


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps of a Poisson process are exponential: mean and standard deviation are both 1 / rate."""
    trace = generate(GeneratorSettings(requests=5000, requests_per_s=10.0), seed=3)
    gaps_s = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(trace.requests)]

    assert mean(gaps_s) == pytest.approx(0.1, rel=0.1)
    assert mean([(gap - 0.1) ** 2 for gap in gaps_s]) ** 0.5 == pytest.approx(0.1, rel=0.1)
    assert min(gaps_s) >= 0


def test_a_seed_decides_everything() -> None:
    """The same seed gives the same trace, another seed another one."""
    settings = GeneratorSettings(requests=40)
    trace = generate(settings, seed=7)

    assert generate(settings, seed=7) == trace != generate(settings, seed=8)


def test_all_share_the_system_prompt_and_turns_share_their_history() -> None:
    """Equal blocks of a conversation have equal predecessors: ids are hashes of prefixes."""
    trace = generate(GeneratorSettings(requests=300, turns_mean=4.0, system_tokens=1200), seed=2)
    before: dict[int, tuple[int, ...]] = {}
    longest_shared = 0

    for request in trace.requests:
        assert request.hash_ids[:2] == (0, 1)
        for position, hash_id in enumerate(request.hash_ids):
            if hash_id in before:
                longest_shared = max(longest_shared, position + 1)
            assert (
                before.setdefault(hash_id, request.hash_ids[:position])
                == request.hash_ids[:position]
            )

    assert longest_shared > 2
