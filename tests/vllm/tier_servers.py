"""Streams of real vLLM with its own CPU tier, and kvrs's policy and tier in it."""

import json
import random
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from kvrs_testkit.vllm_servers import REQUEST_TIMEOUT_S, VllmServers

TOKENS = 600


def asking(*agents: str) -> dict[str, Any]:
    """Fields of a request whose rows are looked up, at these agents of other nodes, too."""
    return {"kv_transfer_params": {"kvrs": {"agents": list(agents)} if agents else {}}}


def with_tier(config: str, name: str) -> dict[str, Any]:
    """The fields of --kv-transfer-config of an instance, by the path of its configuration."""
    return {
        "kv_connector": "KvrsOffloading",
        "kv_connector_module_path": "kvrs.vllm.offloading",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "kvrs_testkit.vllm_cpu_tier",
            "cpu_bytes_to_use": 64 << 20,
            "kvrs": {"config": config, "instance": name},
        },
    }


def prompt_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    return draw.choices(range(5, 200), k=draw.randrange(100, 400))


def stream(
    servers: VllmServers,
    name: str,
    prompt: list[int],
    tokens: int,
    got: Callable[[list[int]], None],
    agents: Sequence[str] = (),
) -> None:
    """Hand on each event's ids, until the stream or its server ends."""
    body = {
        "model": servers.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    } | asking(*agents)
    request = urllib.request.Request(
        servers.url(name) + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    got(json.loads(line[6:])["choices"][0]["token_ids"])
    except OSError:
        return
