"""Which parts of kvrs a proxy for stock vLLM imports, as it starts with two flags."""

from pathlib import Path

import pytest

import kvrs
from experiments.request_path.stock import Stock, started

pytestmark = [pytest.mark.network, pytest.mark.process]


@pytest.fixture(scope="module")
def stock() -> Stock:
    return started(Path(kvrs.__file__).parent.parent)


@pytest.mark.parametrize(
    "room",
    [
        "agent/",
        "gossip/membership.py",
        "gossip/swim.py",
        "core/event_log.py",
        "protocol/anthropic.py",
        "protocol/frames.py",
        "protocol/openai/responses.py",
        "proxy/api/messages.py",
        "proxy/api/responses.py",
        "proxy/backends/sglang.py",
        "proxy/process/workers.py",
        "proxy/streams/event_log.py",
        "sglang/",
        "transfer/puller.py",
        "transfer/server.py",
        "vllm/",
    ],
)
def test_what_the_configuration_does_not_name_is_not_imported(stock: Stock, room: str) -> None:
    loaded = [each for each in stock.modules if each.startswith(f"kvrs/{room}")]

    assert "kvrs/proxy/backends/vllm.py" in stock.modules
    assert loaded == []
