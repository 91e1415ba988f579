"""What Prometheus reads of a proxy: names, labels, and the series of deaths."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.peer import ConnectionLostError, UnusableError
from kvrs.proxy.fleet.watchdog import SilentError
from kvrs.proxy.streams.metrics import DeathCause, Metrics, Total
from kvrs.proxy.watch.watcher import _death_cause
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

WORKERS = ("p0", "p1", "d0", "d1")


async def test_series_of_workers_exist_before_the_first_event(build: ProxyClusterBuilder) -> None:
    """A rate misses the first event of a series that begins with it; an alert on 0 needs a 0."""
    system = await build(wait=False)

    for worker in WORKERS:
        assert await system.count("kvrs_worker_up", worker=worker) in (0, 1)
        assert await system.count("kvrs_attempts_failed_total", worker=worker) == 0
        assert await system.count("kvrs_damaged_pages_total", worker=worker) == 0
        for cause in DeathCause:
            assert await system.count("kvrs_worker_deaths_total", worker=worker, cause=cause) == 0
    for outcome in ("complete", "failed", "client_gone", "rejected"):
        assert await system.count("kvrs_requests_total", outcome=outcome) == 0
    for outcome in ("granted", "denied", "local", "lost"):
        assert await system.count("kvrs_slots_total", outcome=outcome) == 0
    for outcome in ("resumed", "failed", "denied", "ended"):
        assert await system.count("kvrs_recoveries_total", option="migrate", outcome=outcome) == 0
    assert await system.count("kvrs_recovery_real_seconds_count", option="migrate") == 0


def test_a_worker_that_was_never_reached_is_down() -> None:
    """Without a sample `kvrs_worker_up == 0` never fires."""
    text = Metrics([InstanceId("d0")]).render().decode()

    assert 'kvrs_worker_up{worker="d0"} 0.0' in text


def test_names_and_help_follow_the_conventions() -> None:
    """`instance` is the scraper's own label; what only rises is a counter; help is a sentence."""
    families = list(text_string_to_metric_families(Metrics([InstanceId("d0")]).render().decode()))

    assert len(families) > 20
    for family in families:
        assert not any("instance" in sample.labels for sample in family.samples), family.name
        assert re.fullmatch("[A-Z0-9].*[^ ] .*[.]", family.documentation), family.name
        assert not family.name.endswith("_created"), family.name
    rising = {family.name for family in families if family.type == "counter"}
    assert {
        "kvrs_damaged_pages",
        "kvrs_gossip_sent_packets",
        "kvrs_gossip_sent_bytes",
        "kvrs_gossip_dropped_packets",
        "kvrs_gossip_unread_facts",
        "kvrs_worker_deaths",
    } <= rising


async def test_a_death_is_counted_with_its_cause(build: ProxyClusterBuilder) -> None:
    """A worker that is back before the next scrape has died all the same."""
    system = await build()
    killed, frozen = system.instances["d0"], system.instances["d1"]

    await killed.kill()
    frozen.freeze()
    await system.until_health(d0="down", d1="down")

    deaths = "kvrs_worker_deaths_total"
    assert await system.count(deaths, worker="d0", cause=DeathCause.CONNECTION_LOST) == 1
    assert await system.count(deaths, worker="d1", cause=DeathCause.SILENT) == 1
    assert await system.count(deaths) == 2
    assert await system.count("kvrs_worker_up", worker="d0") == 0
    frozen.thaw()
    await system.until_health(d1="up")
    assert await system.count("kvrs_worker_up", worker="d1") == 1
    assert await system.count(deaths) == 2


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ConnectionLostError("connection closed"), DeathCause.CONNECTION_LOST),
        (SilentError("silent for 5 s"), DeathCause.SILENT),
        (UnusableError("HTTP 401"), DeathCause.UNUSABLE),
        (UpstreamError("HTTP 503"), DeathCause.FAILED),
    ],
)
def test_every_fault_has_one_of_few_causes(fault: UpstreamError, cause: DeathCause) -> None:
    """The text of a fault is no label: each address would be a series of its own."""
    assert _death_cause(fault) is cause


def test_a_total_that_restarts_is_added_to_what_was_counted_before() -> None:
    """A worker counts from 0 after a restart; the series only rises."""
    registry = CollectorRegistry()
    total = Total(Counter("pages", "Pages.", ["worker"], registry=registry))

    for seen in (3, 5, 5, 2):
        total.follow(seen, "d0")

    assert registry.get_sample_value("pages_total", {"worker": "d0"}) == 7
