"""The simulator beside formulas that do not know it."""

from random import Random

import pytest

from experiments.simulator import queueing
from kvrs.profiles import catalog


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_wait_of_each_request_is_that_of_the_recursion(load: float) -> None:
    """One server, prompts of 512 tokens, one token each: nothing else takes time."""
    simulated, expected = queueing.queue(load, seed=1, count=120)

    service_s = catalog.prefill_table(queueing.PACE).seconds_for(queueing.PROMPT)
    assert simulated == pytest.approx(expected, rel=1e-9)
    assert max(simulated) > 2 * service_s


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_the_recursion_has_the_percentiles_of_the_formula(load: float) -> None:
    """M/D/1: so the simulator has them, too, with enough requests."""
    rng, at_s, times = Random(2), 0.0, []
    for _ in range(60_000):
        at_s += rng.expovariate(load)
        times.append(at_s)
    waits = sorted(queueing.waits(times, 1.0))

    assert sum(waits) / len(waits) == pytest.approx(queueing.mean_wait(load), rel=0.05)
    for q in (80, 90, 99):
        found = waits[len(waits) * q // 100]
        assert 1 + found == pytest.approx(1 + queueing.wait_percentile(load, q), rel=0.05)
    assert queueing.waits_at_most(load, 0.0) == pytest.approx(1 - load)


def test_a_full_batch_takes_the_time_of_the_decode_table() -> None:
    """With no prefill beside it, a step is a look-up."""
    found = queueing.decode_batch(batch=8, tokens=20)

    assert found.error == pytest.approx(0, abs=1e-3)


def test_a_hand_off_takes_its_bytes_by_the_rate_of_the_link() -> None:
    """Where prefill sends the first token, it waits for none of that."""
    prefill, decode = queueing.hand_off()

    assert prefill.error == pytest.approx(0, abs=1e-3)
    assert decode.error == pytest.approx(0, abs=2e-3)
    assert decode.simulated_s > 2 * prefill.simulated_s
