"""A proxy in front of scripted SGLang servers, prefill and decode apart."""

import json
from collections.abc import Mapping
from typing import Any

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_sglang import ScriptedSglang, SglangScript
from kvrs_testkit.sse import events_of

PROMPT = [5, 6, 7]
TOKENS = 6
ADDRESSES = {"p0": "n0", "d0": "n0", "p1": "n1", "d1": "n1"}
Servers = dict[str, ScriptedSglang]


class Sglangs(ProxyCluster):
    """A proxy, two prefill and two decode servers."""

    shared: SglangScript
    servers: Servers

    async def events(self, **fields: Any) -> list[Any]:
        """The events of a stream that is complete."""
        status, body = await self.ask(
            {"max_tokens": TOKENS, "temperature": 0, "stream": True} | fields
        )
        assert status == 200, body
        *events, done, end = events_of(body)
        assert (done, end) == (b"data: [DONE]", b"")
        return [json.loads(event[6:]) for event in events]

    async def ids(self, prompt: list[int] | str = PROMPT, **fields: Any) -> list[int]:
        events = await self.events(prompt=prompt, return_token_ids=True, **fields)
        return [i for event in events for c in event["choices"] for i in c["token_ids"]]

    async def text(self, content: str, **fields: Any) -> str:
        """The text of a chat."""
        messages = [{"role": "user", "content": content}]
        events = await self.events(messages=messages, **fields)
        choices = [choice for event in events for choice in event["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def open_legs(self) -> int:
        return sum(server.legs for server in self.servers.values())


def document(model: str, ports: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    """The servers of `ADDRESSES` that have a port. With section `backup` nodes have agents, none of
    which runs.
    """
    agents = {"n0": {"port": 1, "page_port": 2}, "n1": {"port": 3, "page_port": 4}}
    nodes = [
        {
            "id": node,
            "instances": [
                {"id": name, "role": role_of(name), "port": ports[name]}
                for name, on in ADDRESSES.items()
                if on == node and name in ports
            ],
            **({"agent": agents[node]} if "backup" in sections else {}),
        }
        for node in agents
    ]
    proxy = {"port": 0, "admin_port": 0, "load_interval_s": 0.05, "self_test": False}
    proxy |= sections.pop("proxy", {})
    cluster = {"backend": "sglang", "model": model, "nodes": nodes}
    return {
        "proxy": proxy,
        "cluster": cluster,
        "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
        **sections,
    }


def role_of(name: str) -> str:
    return "prefill" if name[0] == "p" else "decode"


def new_servers(script: SglangScript) -> Servers:
    return {
        name: ScriptedSglang(name, node, role=role_of(name), script=script)
        for name, node in ADDRESSES.items()
    }
