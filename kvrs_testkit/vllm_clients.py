"""Clients of the kvrs connector in real vLLM: what a proxy and an instance do, without either."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.ids import InstanceId, StreamId
from kvrs.net.proving import Address, ProvingConnector, agent_keys
from kvrs.protocol.connector import connector_key, seal
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    ConnectorReport,
    InstanceInfo,
    KvrsParams,
    LoadReport,
    SourceRange,
)
from kvrs.protocol.page_messages import CheckpointClaim, Identity, PullRequest
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, StoredPages
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.pusher import PagePusher
from kvrs.transfer.send_faults import SendingFaults
from kvrs_testkit.vllm_servers import PAGE_TOKENS, VllmServers


class Clients:
    def __init__(
        self, servers: VllmServers, http: aiohttp.ClientSession, proven: aiohttp.ClientSession
    ) -> None:
        self.servers, self.http, self.proven = servers, http, proven

    async def get(self, url: str, kind: Any) -> Any:
        async with self.proven.get(url) as answer:
            return msgspec.json.decode(await answer.read(), type=kind)

    async def info(self, instance: InstanceSettings) -> InstanceInfo:
        url = f"http://{instance.host}:{instance.connector_port}/kvrs/v1/instance"
        found: InstanceInfo = await self.get(url, InstanceInfo)
        return found

    async def report(self, instance: InstanceSettings) -> ConnectorReport:
        url = f"http://{instance.host}:{instance.connector_port}/kvrs/v1/load"
        report: LoadReport = await self.get(url, LoadReport)
        assert report.connector is not None
        return report.connector

    async def source(self, node: NodeSettings, stream: StreamId) -> SourceRange:
        """The pages of a stream that the node's agent has."""
        agent: AgentInfo = await self.get(node.agent.url + "/kvrs/v1/agent", AgentInfo)
        held: AgentReport = await self.get(node.agent.url + "/kvrs/v1/holdings", AgentReport)
        return SourceRange(node.agent_id, 0, held.pages.get(stream, 0), agent.epoch)

    async def hand_off(
        self, prefill: InstanceSettings, prompt: list[int], params: KvrsParams, salt: str
    ) -> dict[str, Any]:
        """NIXL's parameters for the decode instance, of a prompt that this one has computed."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        body = self._body(prefill, prompt, 1, params, salt, asked) | {"stream": False}
        async with self.http.post(prefill.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = (await answer.json())["kv_transfer_params"]
            return found

    async def generate(
        self,
        instance: InstanceSettings,
        prompt: list[int],
        tokens: int,
        params: KvrsParams | None = None,
        kill_at: int | None = None,
        salt: str | None = None,
        hand_off: dict[str, Any] | None = None,
        on_ids: Callable[[list[int]], None] = lambda _: None,
    ) -> list[int]:
        """The ids of a greedy stream, up to its server's death; `on_ids` gets them with each event
        that has some.
        """
        body = self._body(instance, prompt, tokens, params, salt, hand_off or {})
        ids: list[int] = []
        async with self.http.post(instance.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            try:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = msgspec.json.decode(line[6:])
                        ids += (new := event["choices"][0].get("token_ids") or [])
                        if new:
                            on_ids(ids)
                        if kill_at is not None and len(ids) >= kill_at:
                            await asyncio.sleep(0.3)  # The gathered pages are on their way.
                            self.servers.kill(str(instance.id))
                            kill_at = None
            except aiohttp.ClientPayloadError:
                pass
        return ids

    def _body(
        self,
        instance: InstanceSettings,
        prompt: list[int],
        tokens: int,
        params: KvrsParams | None,
        salt: str | None,
        transfer: dict[str, Any],
    ) -> dict[str, Any]:
        if params is not None:
            sealed = seal(params, connector_key(self.servers.secret, instance.id))
            transfer = transfer | {"kvrs": msgspec.to_builtins(sealed)}
        return {
            "model": self.servers.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "kv_transfer_params": transfer or None,
        }

    # The page port.

    async def tags(
        self, instance: InstanceSettings, history: Sequence[int], salt: str
    ) -> tuple[Tag, ...]:
        info = await self.info(instance)
        return tuple(page_tags(root_tag(info.fingerprint, salt), history, PAGE_TOKENS))

    async def read_pages(
        self, instance: InstanceSettings, node: NodeSettings, tags: Sequence[Tag]
    ) -> list[bytearray]:
        """Pages that the node's agent has, as this instance would get them."""
        config = self.servers.config
        identity = await self._identity(instance)
        puller = PagePuller(lambda: identity, self.servers.secret, config.transfer, time.monotonic)
        pages = [bytearray(identity.page_bytes) for _ in tags]
        try:
            result = await puller.pull(
                _peer(node), PullRequest(tuple(tags)), [memoryview(page) for page in pages], None
            )
        finally:
            await puller.close()
        assert result.full_pages == len(tags), result.error
        return pages

    async def write_pages(
        self,
        instance: InstanceSettings,
        node: NodeSettings,
        stream: StreamId,
        tags: Sequence[Tag],
        pages: Sequence[bytearray],
    ) -> None:
        """Bring pages to the node's agent in the name of this instance."""
        config = self.servers.config
        identity = await self._identity(instance)
        links = SendingLinks(config.transfer, SendingFaults(), identity.node)
        pusher = PagePusher(lambda: identity, self.servers.secret, config.transfer, links)
        claim = CheckpointClaim(stream, 0, 1)
        try:
            await pusher.offer(_peer(node), claim, len(tags) * identity.page_bytes, tuple(tags))
            views = [memoryview(page) for page in pages]
            (held,) = await pusher.store(_peer(node), [StoredPages(claim, 0, tuple(tags), views)])
        finally:
            await pusher.close()
        assert held.pages == len(tags)

    async def _identity(self, instance: InstanceSettings) -> Identity:
        info = await self.info(instance)
        geometry = info.geometry
        return Identity(
            InstanceId("a-test"),
            info.node,
            1,
            info.fingerprint,
            geometry.page_bytes,
            geometry.page_cells,
        )


def _peer(node: NodeSettings) -> Peer:
    return Peer(node.agent_id, node.id, node.agent.host, node.agent.page_port)


@asynccontextmanager
async def clients(servers: VllmServers) -> AsyncIterator[Clients]:
    keys: dict[Address, ScopedKey] = {
        (each.host, each.connector_port): scoped_key(servers.secret, Scope.INSTANCE, each.id)
        for _, each in servers.config.cluster.instances()
    }
    agents = agent_keys(servers.secret, servers.config.cluster.nodes)
    async with (
        aiohttp.ClientSession() as http,
        aiohttp.ClientSession(connector=ProvingConnector({**keys, **agents})) as proven,
    ):
        yield Clients(servers, http, proven)
