"""The proxy's metrics for Prometheus: names, labels, and the series of deaths."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from kvrs import __version__
from kvrs.core.watch import DeathCause
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Reload, ReloadState, SpeculationReport
from kvrs.proxy.streams.stream_metrics import LONG_SECONDS, DurationSeries
from kvrs.proxy.watch.fleet import _death_cause
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.watchdog import SilentError
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

WORKERS = ("p0", "p1", "d0", "d1")
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


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


async def test_drafts_of_an_engine_are_shown(build: ProxyClusterBuilder) -> None:
    """Counts begin again with another process."""
    system = await build()
    worker, tokens = system.instances["d0"], "kvrs_draft_tokens_total"

    for accepted in (30, 10):
        worker.speculation = SpeculationReport("draft", True, 20, 2 * accepted, accepted, 100)
        await system.until(partial(_shows_drafts, system, accepted))

    assert await system.count(tokens, worker="d0", source="draft", outcome="accepted") == 40
    assert await system.count(tokens, worker="d0", source="draft", outcome="rejected") == 40
    assert await system.count(tokens, worker="d0", source="draft", outcome="stale") == 100


async def test_the_state_of_an_instance_that_is_started_again_is_shown(
    build: ProxyClusterBuilder,
) -> None:
    """By what others have heard from it."""
    system = await build()
    reload = Reload(ReloadState.ASSIST, InstanceId("d1"))
    system.instances["d1"].speculation = SpeculationReport(
        "draft", True, helper=InstanceId("d0"), reloads={InstanceId("d0"): reload}
    )
    await system.instances["d0"].kill()
    await system.until_health(d0="down")

    async def shows() -> bool:
        rows = {each["id"]: each for each in (await system.state())["instances"]}
        states = {name: (rows[name].get("state"), rows[name]["paired_with"]) for name in WORKERS}
        return states == {
            "d0": ("assist", "d1"),
            "d1": ("full", "d0"),
            "p0": (None, None),
            "p1": (None, None),
        }

    await system.until(shows)


async def _shows_drafts(system: ProxyCluster, accepted: int) -> bool:
    shown = await system.state()
    await system.metrics()  # Looks at the same reports.
    (of_d0,) = (each["speculation"] for each in shown["instances"] if each["id"] == "d0")
    (of_p0,) = (each["speculation"] for each in shown["instances"] if each["id"] == "p0")
    assert of_p0 is None
    return of_d0 is not None and of_d0["accepted"] == accepted


@pytest.mark.usefixtures("quick_suspicion")
async def test_a_death_is_counted_with_its_cause(build: ProxyClusterBuilder) -> None:
    """A worker that is back before the next scrape has died all the same."""
    system = await build()
    killed, frozen = system.instances["d0"], system.instances["p1"]

    await killed.kill()
    frozen.freeze()
    await system.until_health(d0="down", p1="down")

    deaths = "kvrs_worker_deaths_total"
    assert await system.count(deaths, worker="d0", cause=DeathCause.CONNECTION_LOST) == 1
    assert await system.count(deaths, worker="p1", cause=DeathCause.SILENT) == 1
    assert await system.count(deaths) == 2
    assert await system.count("kvrs_worker_death_notice_seconds_count") == 2
    assert await system.count("kvrs_worker_up", worker="d0") == 0
    frozen.thaw()
    await system.until_health(p1="up")
    assert await system.count("kvrs_worker_up", worker="p1") == 1
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


async def test_a_stream_is_counted_by_its_times_tokens_and_end(build: ProxyClusterBuilder) -> None:
    """The times of its stages are those of the whole stream; it is counted once, at its end."""
    system = await build()

    status, _ = await system.complete(prompt=[5, 6, 7], max_tokens=4, stream=True)

    assert status == 200
    assert await system.count("kvrs_streams_ended_total", finish_reason="length", exact="yes") == 1
    assert await system.count("kvrs_streams_ended_total") == 1
    assert await system.count("kvrs_prompt_tokens_total") == 3
    assert await system.count("kvrs_tokens_relayed_total") == 4
    for once in ("kvrs_ttft", "kvrs_tpot", "kvrs_e2e", "kvrs_client_gap"):
        assert await system.count(f"{once}_seconds_count") == 1
    stages = await system.count("kvrs_stage_seconds_sum")
    assert stages == pytest.approx(await system.count("kvrs_e2e_seconds_sum"), abs=0.05)
    assert await system.count("kvrs_stage_seconds_sum", stage="prefill") > 0
    assert await system.count("kvrs_stage_seconds_sum", stage="decode") > 0


async def test_a_stream_without_a_place_waits(build: ProxyClusterBuilder) -> None:
    """Waiting streams are told from running ones, and shown at no worker."""
    system = await build()
    for worker in ("d0", "d1"):
        await system.instances[worker].kill()
    await system.until_health(d0="down", d1="down")
    asked = asyncio.create_task(system.complete(prompt=[5, 6, 7], max_tokens=4, stream=True))

    async def waits() -> bool:
        return await system.count("kvrs_streams_waiting") == 1

    await system.until(waits)

    assert await system.count("kvrs_streams_active") == 1
    assert await system.count("kvrs_worker_streams") == 0
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_a_stream_is_at_its_decode_instance_from_the_call_on(
    build: ProxyClusterBuilder,
) -> None:
    """Before its first token as well: what prefill took is over."""
    system = await build()
    for worker in ("d0", "d1"):
        system.instances[worker].freeze()
    asked = asyncio.create_task(system.complete(prompt=[5, 6, 7], max_tokens=4, stream=True))

    async def is_called() -> bool:
        return await system.count("kvrs_worker_streams", role="decode") == 1

    await system.until(is_called)

    assert await system.count("kvrs_worker_streams", role="prefill") == 0
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def test_the_load_of_a_worker_is_shown_while_it_reports(build: ProxyClusterBuilder) -> None:
    """The last values of a dead worker are no load of it."""
    system = await build()
    system.instances["d1"].kv_bytes = {"handoff": 4096, "unknown": 1}

    async def reported() -> bool:
        return await system.count("kvrs_worker_kv_bytes_total", worker="d1", kind="handoff") == 4096

    await system.until(reported)
    for name in ("queued_requests", "free_pages", "queue_seconds", "streams"):
        assert await system.count(f"kvrs_worker_{name}", worker="d1", role="decode") >= 0
    assert 'kind="unknown"' not in await system.metrics()
    await system.instances["d1"].kill()
    await system.until_health(d1="down")

    assert 'kvrs_worker_free_pages{role="decode",worker="d1"}' not in await system.metrics()


async def test_the_process_and_its_build_are_shown(build: ProxyClusterBuilder) -> None:
    """Memory, CPU, descriptors and the version belong to every process that is scraped."""
    system = await build()

    assert await system.count("kvrs_build_info", version=__version__) == 1
    assert await system.count("process_resident_memory_bytes") > 1 << 20
    assert await system.count("process_open_fds") > 3


async def test_openmetrics_is_given_where_it_is_asked_for(build: ProxyClusterBuilder) -> None:
    """A scraper that asks for no format gets the text format, of the same series."""
    system = await build()
    url = f"http://127.0.0.1:{system.proxy.admin_port}/metrics"

    async with system.http.get(url, headers={"Accept": OPENMETRICS}) as response:
        kind, body = response.headers["Content-Type"], await response.text()

    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith("# EOF\n")
    families = openmetrics_families(body)  # type: ignore[no-untyped-call]
    open_names = {family.name for family in families}
    names = {family.name for family in text_string_to_metric_families(await system.metrics())}
    assert {name.removesuffix("_info") for name in names} == {
        name.removesuffix("_info") for name in open_names
    }


@given(st.lists(st.one_of(st.sampled_from(LONG_SECONDS), st.floats(0, 1000)), max_size=20))
def test_durations_are_shown_as_the_library_s_histogram_shows_them(observed: list[float]) -> None:
    """Bounds belong to their buckets; with a label and without."""
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    plain = Histogram("a_seconds", "A.", buckets=LONG_SECONDS, registry=theirs)
    series = DurationSeries("a_seconds", "A.", buckets=LONG_SECONDS, registry=ours)
    own = series.by_value[""]
    labelled = Histogram("b_seconds", "B.", ["stage"], buckets=LONG_SECONDS, registry=theirs)
    by_value = DurationSeries(
        "b_seconds", "B.", buckets=LONG_SECONDS, registry=ours, label="stage", values=["x", "y"]
    ).by_value
    for value in by_value:
        labelled.labels(value)

    for seconds in observed:
        plain.observe(seconds)
        own.observe(seconds)
        labelled.labels("y").observe(seconds)
        by_value["y"].observe(seconds)

    assert generate_latest(ours) == generate_latest(theirs)
