"""The time of a step by what stock engines count."""

from typing import Any

import pytest

from kvrs.proxy.backends.stock_facts import CountedSteps
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs_testkit.vllm_cluster import Builder
from tests.proxy.backends.test_sglang import Builder as SglangBuilder


def read(*counts: tuple[float, float], epoch: int = 1) -> float:
    """The last answer, of counts that begin with those at the first read."""
    steps = CountedSteps()
    return [steps.read(epoch, *each) for each in counts][-1]


def test_a_step_takes_what_came_between_two_reads() -> None:
    """All before the first read may be hours old."""
    assert read((1000, 900.0)) == 0.0
    assert read((1000, 900.0), (1010, 900.3)) == pytest.approx(0.03)


def test_one_read_of_slow_steps_does_not_count() -> None:
    """The engine stood still, or compiled a kernel."""
    assert read((0, 0), (10, 0.3), (20, 9.3), (30, 9.6)) == pytest.approx(0.03)


def test_absurd_counts_make_no_report_that_an_event_log_cannot_have() -> None:
    """Reports are read again with the limits of their type."""
    assert read((0, 0.0), (10, 1e30)) == 86_400


def test_steps_that_stay_slow_count_after_two_reads() -> None:
    assert read((0, 0), (10, 0.3), (20, 0.6), (30, 1.2), (40, 1.8)) == pytest.approx(0.06)


def test_a_few_steps_wait_for_more() -> None:
    """One of them alone may be anything; an idle engine keeps what was known."""
    assert read((0, 0), (10, 0.3), (12, 5.3), (12, 5.3)) == pytest.approx(0.03)
    assert read((0, 0), (3, 0.3), (6, 0.6)) == pytest.approx(0.1)


def test_counts_of_another_process_begin_anew() -> None:
    """Also where they have fallen in what counts as one epoch."""
    steps = CountedSteps()
    for each in ((0, 0), (10, 0.3)):
        steps.read(1, *each)

    assert steps.read(2, 1000, 500.0) == 0.0
    assert steps.read(2, 1010, 501.0) == pytest.approx(0.1)
    assert steps.read(2, 10, 0.1) == pytest.approx(0.1)
    assert steps.read(2, 20, 0.2) == pytest.approx((0.1 + 0.01) / 2)


@pytest.mark.parametrize("name", ["inter_token_latency", "time_per_output_token"])
def test_intervals_of_vllm_are_read_by_the_name_of_its_version(name: str) -> None:
    """All engines together. The time per output token of whole requests is another series."""
    series = (
        f'vllm:{name}_seconds_bucket{{engine="0",le="0.01"}} 7.0',
        f'vllm:{name}_seconds_count{{engine="0"}} 7.0',
        f'vllm:{name}_seconds_count{{engine="1"}} 3.0',
        f'vllm:{name}_seconds_sum{{engine="0"}} 0.25',
        f'vllm:{name}_seconds_sum{{engine="1"}} 0.5',
        'vllm:request_time_per_output_token_seconds_count{engine="0"} 99.0',
        'vllm:request_time_per_output_token_seconds_sum{engine="0"} 99.0',
    )

    assert VllmMetrics("\n".join(series)).token_intervals == (10, 750_000)
    assert VllmMetrics("\n".join(series[5:])).token_intervals == (0, 0)


async def assert_known(system: Any, step_s: float) -> None:
    """The report of d0, and what the policy takes of it; nothing is known of others."""

    async def is_known() -> bool:
        rows = {row["id"]: row["load"] for row in (await system.state())["instances"]}
        known = rows["d0"]["step_s"]
        assert known in (0.0, pytest.approx(step_s))
        return bool(known)

    await system.until(is_known)
    members = system.proxy.parts.driver.control.policy.members
    assert members["d0"].times.step_s == pytest.approx(step_s)
    assert members["d1"].times.step_s == members["d1"].times.table.step_overhead_s


@pytest.mark.network
@pytest.mark.parametrize("name", ["inter_token_latency", "time_per_output_token"])
async def test_a_vllm_server_reports_its_intervals_between_tokens(
    vllms: Builder, name: str
) -> None:
    system = await vllms()

    system.servers["d0"].step = name, 0.03

    await assert_known(system, 0.03)


@pytest.mark.network
async def test_an_sglang_server_reports_its_steps_without_prompts(sglangs: SglangBuilder) -> None:
    system = await sglangs()

    system.servers["d0"].step_s = 0.02

    await assert_known(system, 0.02)
