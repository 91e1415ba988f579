"""NIXL's counters and formats in vLLM, as a proxy shows and uses them."""

import asyncio
from typing import Any

import pytest

from kvrs.cli.findings import Finding, Level, ProxyAnswer, cluster_findings
from kvrs.config.file import parse_config
from kvrs.proxy.backends.vllm_metrics import ProcessTotals, VllmMetrics
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Builder, Servers, Vllms, document

NIXL = """
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
vllm:nixl_xfer_time_seconds_sum{engine="1"} 0.25
vllm:nixl_xfer_time_seconds_count{engine="0"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0
vllm:nixl_num_failed_transfers_total{engine="0"} 5.0
vllm:nixl_num_failed_notifications_total{engine="0"} 1.0
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 6.0
vllm:nixl_num_notifications_after_expiry_total{engine="0"} 7.0
vllm:cache_config_info{block_size="32",cache_dtype="fp8",num_gpu_blocks="9"} 1.0
"""


async def row_of(system: Vllms, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = (await system.state())["instances"]
    return next(row for row in rows if row["id"] == name)


async def finding_of(system: Vllms, model: str, check: str) -> Finding | None:
    ports = {name: server.port for name, server in system.servers.items()}
    answer = ProxyAnswer("http://127.0.0.1:1", await system.state())
    found = cluster_findings(parse_config(document(model, ports)), answer)
    return next((each for each in found if each.check == check), None)


def test_counters_are_read_by_their_names() -> None:
    metrics = VllmMetrics(NIXL)
    counts = metrics.hand_offs

    assert counts is not None
    assert (counts.transfers, counts.transferred_bytes, metrics.transfer_s) == (3, 4096, 0.75)
    assert (counts.failed_transfers, counts.failed_notices) == (5, 1)
    assert (counts.expired, counts.late_notices) == (6, 7)
    assert VllmMetrics("").hand_offs is None


def test_the_compatibility_hash_comes_before_what_it_is_made_of() -> None:
    """0.32 shows the type of the cache only; a server without NIXL has no hand-offs."""
    info = 'vllm:nixl_config_info{engine="0",compatibility_hash="ab12"} 1.0\n'

    assert VllmMetrics(NIXL).hand_off_format == "cache_dtype fp8"
    assert VllmMetrics(NIXL + info).hand_off_format == "hash ab12"
    assert VllmMetrics(NIXL.replace("nixl", "x")).hand_off_format == ""


def test_counts_of_several_processes_never_fall() -> None:
    """Each read shows those of one; one that is seen once adds nothing."""
    totals = ProcessTotals()
    reads = [(1.0, 100), (2.0, 7), (1.0, 110), (2.0, 9), (3.0, 500), (1.0, 110), (2.0, 8)]

    assert [totals.add(1, process, [count])[0] for process, count in reads] == [
        *(100, 100, 110, 112, 112, 112, 112)
    ]
    assert totals.add(2, 4.0, [3]) == [3], "another epoch begins anew"


@pytest.mark.network
async def test_failures_are_in_state_and_metrics(vllms: Builder) -> None:
    def prepare(servers: Servers) -> None:
        servers["p0"].nixl = {"num_kv_expired_reqs_total": 3.0}
        servers["d1"].nixl = {"num_failed_transfers_total": 2.0}

    system = await vllms(prepare)

    async def counted(name: str, kind: str) -> float:
        return await system.count("kvrs_hand_off_faults_total", worker=name, kind=kind)

    assert (await row_of(system, "p0"))["hand_offs"]["expired"] == 3
    assert (await row_of(system, "d1"))["hand_offs"]["failed_transfers"] == 2
    assert (await counted("p0", "expired"), await counted("d1", "failed")) == (3, 2)
    assert await counted("d0", "failed") == 0


@pytest.mark.network
async def test_a_pair_of_two_formats_hands_nothing_over(vllms: Builder, vllm_model: str) -> None:
    """The own decode instance reads another one: the other one is used, and it is named."""

    def prepare(servers: Servers) -> None:
        for name, server in servers.items():
            server.hash = "y" if name == "d0" else "x"

    system = await vllms(prepare)

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert (system.servers["d0"].pulled, system.servers["d1"].pulled) == (0, 1)
    assert (await row_of(system, "d0"))["hand_offs"]["differs_from"] == ["p0"]
    assert (await row_of(system, "p0"))["hand_offs"]["differs_from"] == ["d0"]
    assert (await row_of(system, "d1"))["hand_offs"]["differs_from"] == []
    finding = await finding_of(system, vllm_model, "hand-offs of d0")
    assert finding is not None
    assert (finding.level, "p0" in finding.value) == (Level.FAILURE, True)


@pytest.mark.network
async def test_decode_computes_prompts_where_all_formats_differ(vllms: Builder) -> None:
    """vLLM 0.32 names `--kv-cache-dtype` in `/metrics`, and refuses such hand-offs."""

    def prepare(servers: Servers) -> None:
        servers["p0"].cache_dtype = "fp8"

    system = await vllms(prepare)

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert system.servers["p0"].bodies == []
    assert system.servers["d0"].pulled + system.servers["d1"].pulled == 0


@pytest.mark.network
async def test_hand_offs_measure_the_link(vllms: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NIXL's bytes and seconds: what a migration costs is priced by it from then on."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._METRICS_INTERVAL_S", 0.0)

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.bytes_per_token, server.pull_s = 1000.0, 0.00001

    system = await vllms(prepare)

    system.shared.gate, system.shared.gate_at = asyncio.Event(), 1
    asked = asyncio.create_task(system.ids())

    async def is_measured() -> bool:
        return bool((await row_of(system, "d0"))["load"]["links"])

    await system.until_streams_hold(1)
    await system.until(is_measured)  # While the stream goes on.
    system.shared.gate.set()
    await asked

    (link,) = (await row_of(system, "d0"))["load"]["links"]
    assert (link["source"], link["bytes_per_s"]) == ("n0", pytest.approx(1e8))
    (shown,) = [
        row
        for row in (await system.state())["links"]
        if (row["source"], row["target"]) == ("n0", "n0")
    ]
    assert 1e7 < shown["bytes_per_s"] < 1e8, "a lower bound of it, not the assumed one"
