"""A proxy of several models in front of scripted instances, in the caller's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvrs.config.file import parse_config
from kvrs.config.origin import ConfigFile
from kvrs.protocol.instance import Role
from kvrs.proxy.models.process import ModelsProxy
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import SECRET, Script, Scripted


@dataclass
class ModelsCluster:
    """Model NAME has instances pNAME0, dNAME0, pNAME1, ... Mappings are by model."""

    proxy: ModelsProxy
    document: dict[str, Any]
    scripts: dict[str, Script]
    instances: dict[str, list[Scripted]]
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def ask(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the answer; of a stream its bytes."""
        async with self.http.post(self.url + path, json=fields, headers=headers) as response:
            body = await response.read()
            if response.content_type != "application/json":
                return response.status, body
            return response.status, msgspec.json.decode(body)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def complete(self, model: str, **fields: Any) -> tuple[int, Any]:
        asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0} | fields
        return await self.ask("/v1/completions", asked)

    def prompts(self, model: str) -> int:
        """Requests that instances of the model got."""
        return sum(len(instance.bodies) for instance in self.instances[model])

    async def state(self, model: str) -> Any:
        url = f"http://127.0.0.1:{self.proxy.admin_ports[model]}/kvrs/v1/state"
        async with self.http.get(url) as response:
            return msgspec.json.decode(await response.read())

    async def samples(self, model: str, name: str) -> list[Sample]:
        """The samples of a series in the metrics of a model."""
        url = f"http://127.0.0.1:{self.proxy.admin_ports[model]}/metrics"
        async with self.http.get(url) as response:
            families = text_string_to_metric_families(await response.text())
        return [sample for family in families for sample in family.samples if sample.name == name]

    async def responses(self, model: str) -> dict[str, float]:
        """The responses to completions that a model has counted, by status."""
        return {
            sample.labels["code"]: sample.value
            for sample in await self.samples(model, "kvrs_http_responses_total")
            if sample.labels["path"] == "/v1/completions"
        }

    async def until_streams(self, model: str, count: int) -> None:
        """Wait until so many streams of a model are open."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.proxy.by_name[model].parts.driver.streams) != count:
                await asyncio.sleep(0.005)

    async def until_up(self, model: str, count: int) -> None:
        """Wait until exactly so many instances of a model are up."""
        known = self.proxy.by_name[model].parts.driver.control.instances
        async with asyncio.timeout(WITHIN_S):
            while sum(known.is_up(name) for name in known.known) != count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def open_models_cluster(
    *names: str,
    models: Mapping[str, Any] | None = None,
    pairs: int = 2,
    down: Collection[str] = (),
    up: Mapping[str, int] | None = None,
    prepare: Callable[[Scripted], object] = lambda _: None,
    **sections: dict[str, Any],
) -> AsyncIterator[ModelsCluster]:
    """A cluster of these models, all up but for those that are `down` from the start on; `up`: of
    some models only so many instances come up. `models`: further sections of an entry, by model;
    `sections`: of the file. A reload takes the `document` as it is then.
    """
    async with AsyncExitStack() as stack:
        scripts = {name: Script() for name in names}
        instances: dict[str, list[Scripted]] = {name: [] for name in names}
        entries = []
        for name in names:
            nodes = []
            for number in range(pairs):
                node = f"n{name}{number}"
                rows = []
                for role in (Role.PREFILL, Role.DECODE):
                    instance = Scripted(
                        f"{role.value[0]}{name}{number}",
                        node,
                        role=role,
                        script=scripts[name],
                        model=name,
                    )
                    prepare(instance)
                    if name in down:
                        (instance.port,) = free_ports(1)
                    else:
                        await instance.start()
                        stack.push_async_callback(instance.close)
                    instances[name].append(instance)
                    row = {"id": instance.id, "role": role.value, "port": instance.port}
                    rows.append(row)
                nodes.append({"id": node, "instances": rows})
            entry: dict[str, Any] = {"name": name, **(models or {}).get(name, {})}
            entry["cluster"] = {**entry.get("cluster", {}), "nodes": nodes}
            entries.append(entry)
        proxy_section = {"port": 0, "admin_port": 0, "load_interval_s": 0.05, "self_test": False}
        document: dict[str, Any] = {**sections, "proxy": proxy_section | sections.get("proxy", {})}
        document["models"] = entries
        config = parse_config(document)
        file = ConfigFile(Path("kvrs.yaml"), lambda: parse_config(document))
        proxy = ModelsProxy(config, SECRET, file=file)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        cluster = ModelsCluster(proxy, document, scripts, instances, http)
        for name in names:
            await cluster.until_up(name, (up or {}).get(name, 0 if name in down else 2 * pairs))
        yield cluster
