"""Loads of recovered streams, by the counters of the vLLM server that took them."""

import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, STORE, FetchReport
from kvrs.proxy.backends.bodies import RowLoad
from kvrs.proxy.backends.vllm_fields import RowLoads
from kvrs.proxy.backends.vllm_metrics import VllmMetrics

N0, N1 = NodeId("n0"), NodeId("n1")
PAGE_BYTES, TOKEN_BYTES = 1600, 100


def counters(size_bytes: float, seconds: float = 0.0, started_s: float = 7.0) -> VllmMetrics:
    labels = 'engine="0",tier="1:KvrsTier"'
    return VllmMetrics(
        f"process_start_time_seconds {started_s}\n"
        f"vllm:kv_offload_tiering_read_bytes_total{{{labels}}} {size_bytes}\n"
        f"vllm:kv_offload_tiering_read_time_total{{{labels}}} {seconds}\n"
    )


def load(name: str, pages: int, node: NodeId = N0) -> RowLoad:
    agents = (InstanceId(f"agent-{node}"),)
    return RowLoad(StreamId(name), 2, 0, 20 * pages, agents, pages, node)


def told(loads: RowLoads, size_bytes: float, now_s: float, **counted: float) -> list[FetchReport]:
    return loads.read(counters(size_bytes, **counted), TOKEN_BYTES, now_s)


def tokens_of(reports: list[FetchReport]) -> dict[str, tuple[int, int]]:
    return {each.stream: (each.loaded_tokens, each.computed_tokens) for each in reports}


@pytest.mark.parametrize(
    ("came_bytes", "found"),
    [
        pytest.param(4800.0, {"A": (16, 4), "B": (32, 8)}, id="all"),
        pytest.param(2400.0, {"A": (8, 12), "B": (16, 24)}, id="half of it"),
        pytest.param(9600.0, {"A": (16, 4), "B": (32, 8)}, id="others load too"),
        pytest.param(0.0, {"A": (0, 20), "B": (0, 40)}, id="nothing"),
    ],
)
def test_streams_share_what_came_while_they_had_no_token(
    came_bytes: float, found: dict[str, tuple[int, int]]
) -> None:
    """A moment after the last of them has one, and for a few seconds."""
    loads = RowLoads(N0)
    told(loads, 500.0, 0.0)
    first, second = load("A", 1), load("B", 2)
    loads.begin(first, PAGE_BYTES, 0.0)
    loads.begin(second, PAGE_BYTES, 0.0)
    first.over_s = 1.0
    assert told(loads, 500.0 + came_bytes / 2, 1.0) == []
    second.over_s = 1.0
    assert told(loads, 500.0 + came_bytes, 2.0) == []
    assert told(loads, 500.0 + came_bytes, 2.2) == []

    assert tokens_of(told(loads, 500.0 + came_bytes, 3.0)) == found
    assert tokens_of(told(loads, 500.0 + came_bytes, 7.0)) == found
    assert told(loads, 500.0 + came_bytes, 9.0) == []


def test_counters_of_the_next_process_begin_anew() -> None:
    loads = RowLoads(N0)
    told(loads, 5000.0, 0.0)
    own = load("A", 1)
    loads.begin(own, PAGE_BYTES, 0.0)
    own.over_s = 1.0
    told(loads, 9000.0, 1.0, started_s=8.0)

    assert tokens_of(told(loads, 9000.0, 2.0, started_s=8.0)) == {"A": (0, 20)}


def test_bytes_are_counted_by_what_they_were_loaded_for() -> None:
    """None that came before the proxy knew the server; what is more than recovered streams could
    load is of new prompts.
    """
    loads = RowLoads(N0)
    told(loads, 5000.0, 0.0)
    assert loads.kv_bytes == {"recovery": 0, "prefix": 0}
    told(loads, 5300.0, 1.0)
    assert loads.kv_bytes == {"recovery": 0, "prefix": 300}

    own = load("A", 1)
    loads.begin(own, PAGE_BYTES, 0.0)
    own.over_s = 1.0
    told(loads, 7300.0, 2.0)
    told(loads, 7300.0, 3.0)

    assert loads.kv_bytes == {"recovery": 1600, "prefix": 700}
    told(loads, 900.0, 4.0, started_s=8.0)
    told(loads, 1000.0, 5.0, started_s=8.0)
    assert loads.kv_bytes == {"recovery": 1600, "prefix": 800}


@pytest.mark.parametrize(("node", "source"), [(N0, MEMORY), (N1, N1)])
def test_the_rate_of_a_load_is_that_of_the_agents_link(node: NodeId, source: NodeId) -> None:
    """Within the node of its memory."""
    loads = RowLoads(N0)
    told(loads, 0.0, 0.0)
    own = load("A", 10, node)
    loads.begin(own, PAGE_BYTES, 0.0)
    own.over_s = 1.0
    told(loads, 16000.0, 1.0, seconds=0.01)

    (link,) = loads.links(1.0)
    assert (link.source, link.bytes_per_s) == (source, 1.6e6)


# Loads of a store.

BLOCK_TOKENS = 16


def store_counters(
    asked: float, hits: float, seconds: float | None = None, source: str = "external_unspecified"
) -> VllmMetrics:
    labels = 'engine="0"'
    lines = [
        "process_start_time_seconds 7.0",
        "# TYPE vllm:mooncake_store_operation_time_seconds histogram",
        f"vllm:external_prefix_cache_queries_total{{{labels}}} {asked}",
        f'vllm:prompt_tokens_cached_by_source_total{{{labels},source="{source}"}} {hits}',
    ]
    if seconds is not None:
        name = "vllm:mooncake_store_operation_time_seconds_sum"
        lines.append(f'{name}{{{labels},operation="load_get",status="ok"}} {seconds}')
        lines.append(f'{name}{{{labels},operation="save_put",status="ok"}} 99.0')
    return VllmMetrics("\n".join(lines) + "\n")


def stored(name: str, pages: int) -> RowLoad:
    history = pages * BLOCK_TOKENS + 4
    return RowLoad(StreamId(name), 2, 0, history, (), pages, STORE)


def settled(loads: RowLoads, *counters: VllmMetrics) -> list[FetchReport]:
    """Read these, of which the last holds on until the loads are known."""
    for at, each in enumerate(counters):
        loads.read(each, TOKEN_BYTES, float(at))
    return loads.read(counters[-1], TOKEN_BYTES, len(counters) + 1.0)


@pytest.mark.parametrize(
    ("asked", "hits", "found"),
    [
        pytest.param(36, 32, {"A": (32, 4)}, id="all"),
        pytest.param(36, 16, {"A": (16, 20)}, id="half of it"),
        pytest.param(36, 0, {"A": (0, 36)}, id="nothing"),
        pytest.param(4, 0, {"A": (0, 4)}, id="the own cache had the rest"),
        pytest.param(46, 40, {"A": (30, 4)}, id="others had 10 at most"),
        pytest.param(136, 32, {}, id="others may have had all"),
        pytest.param(136, 0, {"A": (0, 36)}, id="nobody had any"),
    ],
)
def test_of_a_store_counts_what_other_requests_cannot_have_had(
    asked: float, hits: float, found: dict[str, tuple[int, int]]
) -> None:
    """Every prompt asks it: those of others had no more than they asked for."""
    loads, own = RowLoads(N0), stored("A", 2)
    loads.read(store_counters(1000, 500), TOKEN_BYTES, 0.0)
    loads.begin(own, PAGE_BYTES, 0.0)
    own.over_s = 1.0

    assert tokens_of(settled(loads, store_counters(1000 + asked, 500 + hits))) == found
    counted = sum(loads.kv_bytes.values())
    assert counted == hits * TOKEN_BYTES
    assert loads.kv_bytes["recovery"] == sum(has for has, _ in found.values()) * TOKEN_BYTES


@pytest.mark.parametrize(
    ("seconds", "bytes_per_s"),
    [
        pytest.param((2.0, 2.5), 32 * TOKEN_BYTES / 0.5, id="by its own times"),
        pytest.param((None, 0.5), 32 * TOKEN_BYTES / 0.5, id="its first load"),
        pytest.param((None, None), 32 * TOKEN_BYTES / 4.0, id="up to the token"),
    ],
)
def test_the_rate_of_a_store_is_that_of_its_loads(
    seconds: tuple[float | None, float | None], bytes_per_s: float
) -> None:
    loads, own = RowLoads(N0), stored("A", 2)
    before, after = seconds
    loads.read(store_counters(1000, 500, before), TOKEN_BYTES, 0.0)
    loads.begin(own, PAGE_BYTES, 1.0)
    own.over_s = 5.0

    settled(loads, store_counters(1036, 532, after))

    (link,) = loads.links(5.0)
    assert link.source == STORE
    assert link.bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("source", ["device", "host", "p2p"])
def test_the_servers_own_memory_and_its_peers_are_no_store(source: str) -> None:
    """Nor is what kvrs's tier loads from agents."""
    found = store_counters(1000, 500, source=source)
    assert found.store == "mooncake"
    assert found.store_loads.hits == 0
    tier = 'vllm:kv_offload_tiering_read_bytes_total{tier="1:KvrsTier"} 0.0\n'
    hits = 'vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"} 5.0\n'
    assert VllmMetrics(hits).store == "other"
    assert VllmMetrics(hits + tier).store == ""
    assert VllmMetrics(hits.replace("external_unspecified", source)).store == ""
