"""A proxy in front of scripted vLLM servers."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of

PROMPT = [5, 6, 7]
TOKENS = 6
LONG = list(range(40))  # Two pages and a half.
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "torch_dtype": "bfloat16",
}
ADDRESSES = {"p0": "n0", "d0": "n0", "d1": "n1"}
Servers = dict[str, ScriptedVllm]


class Vllms(ProxyCluster):
    """A proxy, one prefill and two decode servers."""

    shared: VllmScript
    servers: Servers

    async def ids(self, prompt: list[int] | str = PROMPT, **fields: Any) -> list[int]:
        request = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        status, body = await self.ask(request | fields)
        assert status == 200, body
        *events, done, end = events_of(body)
        assert (done, end) == (b"data: [DONE]", b"")
        return [
            i for event in events for c in json.loads(event[6:])["choices"] for i in c["token_ids"]
        ]

    async def causes(self) -> list[tuple[str, str, str]]:
        return [
            (row["option"], row["from"], row["to"]) for row in (await self.state())["recoveries"]
        ]


Builder = Callable[..., Awaitable[Vllms]]


def document(
    model: str,
    ports: dict[str, int],
    agents: Mapping[str, int] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """The servers of `ADDRESSES` that have a port; `agents` are ports by node."""
    nodes = [
        {
            "id": node,
            "agent": {"port": (agents or {}).get(node, 0)},
            "instances": [
                {
                    "id": name,
                    "role": "prefill" if name[0] == "p" else "decode",
                    "port": ports[name],
                }
                for name, on in ADDRESSES.items()
                if on == node and name in ports
            ],
        }
        for node in ("n0", "n1")
    ]
    proxy = {"port": 0, "admin_port": 0, "load_interval_s": 0.05, "self_test": False}
    proxy |= sections.pop("proxy", {})
    cluster = {"backend": "vllm", "model": model, "nodes": nodes, **sections.pop("cluster", {})}
    return {
        "proxy": proxy,
        "cluster": cluster,
        "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
        **sections,
    }
