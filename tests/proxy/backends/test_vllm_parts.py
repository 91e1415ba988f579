"""The parts of vLLM that kvrs reads: hand-off parameters, metrics, and the shape of the model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrs.errors import ConfigError, UpstreamError
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import SpeculationReport
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.model_config import read_geometry
from kvrs.proxy.backends.pd import OpenAiPeer
from kvrs.proxy.backends.vllm import _check_probe
from kvrs.proxy.backends.vllm_fields import Transfer, checked
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.upstream import Access, EngineLinks

# As vLLM 0.32 answers for a prompt of 150 tokens.
SEEN: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5]],
    "remote_engine_id": "688cbf5c-f6bd-45ec-8f27-370f964ae340",
    "remote_request_id": "cmpl-a40f26226f8c344e-0-aef68cd4",
    "remote_host": "127.0.0.1",
    "remote_port": 5801,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 150,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def check(changes: dict[str, Any]) -> Transfer:
    fields = {name: value for name, value in (SEEN | changes).items() if value is not ...}
    return checked(msgspec.json.encode(fields), history_tokens=150, page_size_tokens=32)


def test_parameters_with_a_small_field_of_a_later_version_are_taken() -> None:
    assert check({}).remote_engine_id == SEEN["remote_engine_id"]
    assert check({"remote_layout": "HND", "remote_speed": 1.5}) == check({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, ...) for name in list(SEEN)[:8]),
        ("do_remote_prefill", False),
        ("do_remote_decode", True),
        ("remote_block_ids", []),
        ("remote_block_ids", [[]]),
        ("remote_block_ids", [[1, 2, 3, 4]]),
        ("remote_block_ids", [[1, 2, 3, 4, -5]]),
        ("remote_block_ids", "12345"),
        ("remote_engine_id", ""),
        ("remote_engine_id", None),
        ("remote_request_id", "x" * 257),
        ("remote_host", "a b"),
        ("remote_host", "http://x/"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", "5801"),
        ("tp_size", 0),
        ("remote_num_tokens", 149),
        ("remote_num_tokens", 151),
        ("transfer_mode", 1),
        ("transfer_mode", "push"),
        ("something", {"new": 1}),
        ("something", [1]),
        ("something", "x" * 65),
    ],
)
def test_parameters_that_would_hurt_are_named_and_never_passed_on(name: str, value: Any) -> None:
    """With too few blocks the decode engine dies, and without a request id its stream hangs for
    ever.
    """
    with pytest.raises(UpstreamError, match=name):
        check({name: value})


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(UpstreamError, match="kv_transfer_params"):
        checked(b"[1]", 150, 32)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="1024",\
path="a\\"b,c={d}"} 1.0
vllm:request_prefill_time_seconds_sum{engine="0"} 3.0
vllm:request_prefill_time_seconds_count{engine="0"} 6.0
vllm:nixl_bytes_transferred_sum{engine="0"} 0.0
process_start_time_seconds 1.79516782213e+09
"""


def test_metrics_of_several_engines_are_added() -> None:
    metrics = VllmMetrics(METRICS)

    assert metrics.started_s == 1795167822.13
    assert (metrics.running, metrics.waiting, metrics.pages) == (5, 4, (1280, 2048))
    assert (metrics.prefill_s, metrics.page_size_tokens, metrics.has_connector) == (0.5, 32, True)
    assert metrics.cache["enable_prefix_caching"] == "True"


def test_metrics_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load report reads twenty values of a text of tens of kilobytes, each second."""
    metrics = VllmMetrics(METRICS)
    monkeypatch.setattr("kvrs.proxy.backends.vllm_metrics._LINE", None)

    assert metrics.started_s is not None
    assert metrics.progress > 0
    assert metrics.page_size_tokens > 0


def test_metrics_of_several_api_servers_have_no_start_time() -> None:
    """Their common registry has none of the process; nor have those that are no numbers."""
    start = "process_start_time_seconds 1.79516782213e+09"

    for said in ("", "process_start_time_seconds 1e999", "process_start_time_seconds 1-1"):
        assert start in METRICS
        assert VllmMetrics(METRICS.replace(start, said)).started_s is None


@pytest.mark.parametrize("name", ["vllm:num_requests_waiting", "vllm:cache_config_info"])
def test_metrics_that_are_missing_are_named(name: str) -> None:
    metrics = VllmMetrics(
        "\n".join(line for line in METRICS.split("\n") if not line.startswith(name))
    )

    with pytest.raises(UnusableError, match=f"lack {name}"):
        _ = (metrics.waiting, metrics.page_size_tokens)


@pytest.mark.parametrize(
    ("line", "changed", "said"),
    [
        ('num_gpu_blocks="1024"', 'num_gpu_blocks="None"', "num_gpu_blocks of 'None'"),
        ('num_gpu_blocks="1024",', "", "num_gpu_blocks of ''"),
        (
            'waiting{engine="0",model_name="tiny"} 4.0',
            'waiting{engine="0"} 1e999',
            "lack vllm:num_requests_waiting",
        ),
    ],
)
def test_metrics_that_make_no_sense_are_named(line: str, changed: str, said: str) -> None:
    """The fault is vLLM's: as an internal error it would end the proxy."""
    assert line in METRICS
    metrics = VllmMetrics(METRICS.replace(line, changed))

    with pytest.raises(UnusableError, match=said):
        _ = (metrics.waiting, metrics.pages)


def test_drafts_of_its_own_are_counted() -> None:
    """Where the server speculates; the steps, what they proposed, what was right."""
    drafts = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {count}.0\n'
        for engine in (0, 1)
        for name, count in (("drafts", 5), ("draft_tokens", 20), ("accepted_tokens", 7 + engine))
    )

    found = VllmMetrics(METRICS + drafts).drafts

    assert found == SpeculationReport("engine", active=True, steps=10, proposed=40, accepted=15)
    assert VllmMetrics(METRICS).drafts is None


def test_a_prefill_time_is_zero_before_the_first_request() -> None:
    assert VllmMetrics("").prefill_s == 0.0


LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "geometry"),
    [
        (LLAMA, KvGeometry(80, 8, 128, 2, 16)),
        (LLAMA | {"head_dim": 64}, KvGeometry(80, 8, 64, 2, 16)),
        (
            {name: value for name, value in LLAMA.items() if "key" not in name},
            KvGeometry(80, 64, 128, 2, 16),
        ),
        ({"text_config": LLAMA, "num_hidden_layers": 3}, KvGeometry(80, 8, 128, 2, 16)),
        (LLAMA | {"text_config": None, "head_dim": None}, KvGeometry(80, 8, 128, 2, 16)),
        (LLAMA | {"torch_dtype": None, "dtype": "float32"}, KvGeometry(80, 8, 128, 4, 16)),
    ],
)
def test_the_shape_of_a_models_kv_is_in_its_config(
    config: dict[str, Any], geometry: KvGeometry, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_geometry(str(tmp_path), 16) == geometry


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(LLAMA | {"num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json.dumps(LLAMA | {"torch_dtype": "int3"}), "torch_dtype is 'int3'"),
        (json.dumps(LLAMA | {"torch_dtype": ["int3"]}), "torch_dtype is"),
        (json.dumps(LLAMA | {"head_dim": "64"}), "head_dim is '64'"),
        (json.dumps({"text_config": [1]}), "text_config is"),
        ("[]", "not an object"),
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        (None, "No such file"),
    ],
)
def test_a_config_that_lacks_a_field_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=said):
        read_geometry(str(tmp_path), 16)


DEEP = b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


async def _answer(answer: bytes) -> AsyncIterator[OpenAiPeer]:
    async def said(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", said)
    async with TestServer(app) as server, EngineLinks(Access()) as links:
        yield OpenAiPeer(links, str(server.make_url("")).rstrip("/"))


@pytest.mark.network
@pytest.mark.parametrize(
    "answer", [DEEP, b'{"said": "\xff", "choices": "\xff", "x\xff": 1}'], ids=["deep", "no text"]
)
async def test_an_answer_that_cannot_be_read_is_named(answer: bytes) -> None:
    """Any bytes give a named fault: an internal error would end the proxy."""
    async for peer in _answer(answer + b"\n"):
        with pytest.raises(UpstreamError, match="unexpected answer"):
            await peer.control("GET", "/x", None, _Anything)
        with pytest.raises(UpstreamError, match="unexpected report"):
            async with peer.watch("/x", 1.0, _Anything) as reports:
                await anext(reports)
        with pytest.raises(UpstreamError, match="not a completion"):
            await peer.prefill(Call("/x", {}))
    with pytest.raises(UpstreamError, match="cannot be used"):
        checked(answer, 3, 16)
    with pytest.raises(UpstreamError, match="not a completion"):
        _check_probe([answer])


class _Anything(msgspec.Struct):
    said: str = ""
