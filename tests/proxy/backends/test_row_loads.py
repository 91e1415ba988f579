"""Loads of recovered streams, by the counters of the vLLM server that took them."""

import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, FetchReport
from kvrs.proxy.backends.bodies import RowLoad
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs.proxy.backends.vllm_rows import RowLoads

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
