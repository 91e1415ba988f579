"""Gateways in front of proxies, with the files of docs/guide/beside.md."""

import asyncio
import copy
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kvrs.config.file import Config
from kvrs.proxy.server import IDLE_TIMEOUT_S
from kvrs.proxy.streams.open_stream import KEEP_ALIVE_S
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import Cut, Fault

pytestmark = [pytest.mark.process, pytest.mark.network]

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "beside.md").read_text()
# Programs by gateway: beside the interpreter that runs, or of another environment.
PROGRAMS = {
    name: os.environ.get(f"KVRS_{name.upper()}")
    or shutil.which(name, path=str(Path(sys.executable).parent))
    or shutil.which(name)
    or shutil.which(name, path="/usr/sbin")
    for name in ("nginx", "envoy", "litellm")
}
TOKENS = 8
KEY = "sk-" + "0123456789abcdef" * 4  # Of LiteLLM, which does not start without one.
_HEADERS = {"Authorization": f"Bearer {KEY}"}


def snippet(gateway: str) -> str:
    """The file of the page, which begins with the heading of the gateway."""
    section = PAGE.partition(f"## {gateway}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)
    return str(found)


def file_of(
    gateway: str, port: int, group: MultiProxyCluster, directory: Path, picks: str
) -> list[str]:
    """Write the file for these proxies; the arguments that run it. `picks`: the endpoint that Envoy
    names in place of a picker, behind the page's filter of clients' headers; empty: no filters.
    """
    path = directory / gateway
    ports = [config.proxy.port for config in group.configs]
    if gateway == "nginx":
        text = snippet("nginx").replace("listen 8080", f"listen 127.0.0.1:{port}")
        for number, to in enumerate(ports):
            text = text.replace(f"kvrs-{number}:8000", f"127.0.0.1:{to}")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f"{kind}_temp_path {directory}/{kind};" for kind in kinds)
        path.write_text(
            f"daemon off; master_process off; pid {directory}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; {folders}\n{text}}}\n"
        )
        return ["-c", str(path)]
    if gateway == "envoy":
        text = snippet("Envoy").replace(
            "0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {port}"
        )
        for number, to in enumerate(ports):
            text = text.replace(f"kvrs-{number}, port_value: 8000", f"127.0.0.1, port_value: {to}")
        if picks:
            removing, _ = yaml.safe_load(snippet("Endpoint picker"))
            naming = copy.deepcopy(removing)
            named = {"key": "x-gateway-destination-endpoint", "value": picks}
            naming["typed_config"]["mutations"]["request_mutations"] = [
                {"append": {"header": named, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}
            ]
            text = with_filters(text, [removing, naming])
        path.with_suffix(".yaml").write_text(text)
        return ["-c", f"{path}.yaml", "--disable-hot-restart", "--concurrency", "1", "-l", "error"]
    text = snippet("LiteLLM").replace("kvrs:8000", f"127.0.0.1:{ports[0]}")
    served = group.proxy(0).parts.driver.control.instances.model
    path.with_suffix(".yaml").write_text(text.replace("openai/llama", f"openai/{served}"))
    return ["--config", f"{path}.yaml", "--port", str(port), "--host", "127.0.0.1"]


def with_filters(text: str, filters: list[Any]) -> str:
    """Envoy's file with these filters in front of the router."""
    document = yaml.safe_load(text)
    (listener,) = document["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    chain["filters"][0]["typed_config"]["http_filters"][:0] = filters
    return yaml.safe_dump(document)


@asynccontextmanager
async def behind(
    gateway: str, group: MultiProxyCluster, directory: Path, picks: str = ""
) -> AsyncIterator[str]:
    """The URL of a gateway that runs in front of the group, once it answers."""
    program = PROGRAMS[gateway]
    if program is None:
        pytest.skip(f"no {gateway} here (or KVRS_{gateway.upper()})")
    (port,) = free_ports(1)
    environ = os.environ | {
        "LITELLM_MASTER_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HOME": str(directory),
    }
    environ.pop("PYTHONPATH", None)
    started = await asyncio.create_subprocess_exec(
        program,
        *file_of(gateway, port, group, directory, picks),
        env=environ,
        cwd=directory,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=sys.stderr,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(3 * WITHIN_S):
            while await status_of(group.http, f"{url}/v1/models") != 200:
                assert started.returncode is None, f"{gateway} has ended"
                await asyncio.sleep(0.05)
        yield url
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def status_of(http: aiohttp.ClientSession, url: str) -> int:
    try:
        async with http.get(url, headers=_HEADERS) as answer:
            return answer.status
    except aiohttp.ClientError:
        return 0


class Through(MultiProxyCluster):
    """The group, as clients of the gateway reach it."""

    gateway = ""

    def url(self, proxy: int) -> str:
        return self.gateway


def through(group: MultiProxyCluster, url: str) -> Through:
    made = Through(group.system, group.configs, group.proxies, group.http)
    made.gateway = url
    return made


@pytest.mark.parametrize("gateway", ["nginx", "envoy"])
async def test_a_stream_survives_an_instance_and_a_proxy_behind_a_gateway(
    gateway: str, tmp_path: Path
) -> None:
    """The death of the decode instance is not seen; after that of the proxy the client resumes with
    its key, and the gateway leads it to the other one. Not a token is missing or twice.
    """
    async with open_proxy_group(2) as group, behind(gateway, group, tmp_path) as url:
        wanted = group.reader("direct", max_tokens=TOKENS)
        await wanted.read(0)
        group.system.script.cuts["cut"] = Cut(Fault.RESET, 2)
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 5
        reader = through(group, url).reader("k", max_tokens=TOKENS, user="cut")
        reading = asyncio.create_task(reader.read(0))
        async with asyncio.timeout(WITHIN_S):
            while len(reader.events) < 5:
                await asyncio.sleep(0.005)
        (serves,) = (n for n in range(2) if group.mirror(n).streams)

        await group.kill(serves)
        await reading
        gate.set()
        await reader.read_all(0)
        others = [through(group, url).reader(str(number)) for number in range(4)]
        statuses = [await other.read(0) for other in others]

    assert statuses == [200] * 4  # A connection that is refused is tried at the other proxy.
    assert [without_ids(each) for each in reader.events] == [
        without_ids(each) for each in wanted.events
    ]
    assert not group.system.script.cuts  # It has happened.


async def test_a_stream_survives_the_instance_that_a_picker_has_chosen(tmp_path: Path) -> None:
    """Behind Envoy a client picks nothing: the gateway does, and kvrs recovers."""
    async with open_proxy_group(1, proxy={"endpoint_picker": True}) as group:
        picked, other = (f"127.0.0.1:{group.system.instances[name].port}" for name in ("d1", "d0"))
        async with behind("envoy", group, tmp_path, picks=picked) as url:
            group.system.script.cuts["cut"] = Cut(Fault.RESET, 2)
            fields = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "temperature": 0, "user": "cut"}
            asked = {
                "x-gateway-destination-endpoint": other,
                "endpoint-load-metrics-format": "TEXT",
            }
            async with group.http.post(
                f"{url}/v1/completions", json=fields | {"stream": True}, headers=asked
            ) as answer:
                body = await answer.read()

    assert answer.headers["x-gateway-destination-endpoint-served"] == picked
    assert "endpoint-load-metrics" not in answer.headers
    assert body.endswith(b"data: [DONE]\n\n")
    assert not group.system.script.cuts  # It has happened.
    calls = [len(group.system.instances[name].completions) for name in ("d1", "d0")]
    assert calls == [1, 1]


async def test_envoy_accepts_the_filters_of_the_endpoint_picker(tmp_path: Path) -> None:
    if (program := PROGRAMS["envoy"]) is None:
        pytest.skip("no envoy here (or KVRS_ENVOY)")
    document = yaml.safe_load(
        with_filters(snippet("Envoy"), yaml.safe_load(snippet("Endpoint picker")))
    )
    document["static_resources"]["clusters"].append({"name": "picker", "type": "STATIC"})
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(document))

    checking = await asyncio.create_subprocess_exec(
        program, "--mode", "validate", "-c", str(path), stderr=asyncio.subprocess.PIPE
    )
    _, said = await checking.communicate()

    assert checking.returncode == 0, said.decode()


def test_istio_has_the_limits_of_envoy() -> None:
    """It is an Envoy, which nobody runs here with files of Istio."""
    service, rule = yaml.safe_load_all(snippet("Istio"))
    (envoy,) = yaml.safe_load(snippet("Envoy"))["static_resources"]["listeners"]
    manager = envoy["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]

    (http,) = service["spec"]["http"]
    assert http["timeout"] == route["timeout"]
    assert http["retries"]["retryOn"] == route["retry_policy"]["retry_on"]
    assert http["retries"]["attempts"] == route["retry_policy"]["num_retries"]
    idle_s = int(rule["spec"]["trafficPolicy"]["connectionPool"]["http"]["idleTimeout"][:-1])
    assert idle_s < IDLE_TIMEOUT_S
    assert "outlierDetection" not in rule["spec"]["trafficPolicy"]


async def test_a_stream_of_litellm_survives_an_instance(tmp_path: Path) -> None:
    """Its client gets the text that the proxy gives to its own."""
    fields = {
        "model": "llama",
        "messages": [{"role": "user", "content": "play latin."}],
        "temperature": 0,
        "max_tokens": 40,
        "stream": True,
    }
    async with open_proxy_group(1) as group, behind("litellm", group, tmp_path) as url:
        served = group.proxy(0).parts.driver.control.instances.model
        wanted = await text_of(group, group.url(0), fields | {"model": served})
        group.system.script.cuts[""] = Cut(Fault.RESET, 5)  # LiteLLM sends no `user`.

        found = await text_of(group, url, fields)

        assert not group.system.script.cuts  # It has happened.
    assert found == wanted != ""


async def text_of(group: MultiProxyCluster, url: str, fields: dict[str, object]) -> str:
    async with group.http.post(
        f"{url}/v1/chat/completions", json=fields, headers=_HEADERS
    ) as answer:
        body = await answer.read()
    assert answer.status == 200, body
    events = re.findall(rb"data: (\{.*\})", body)
    deltas = [json.loads(each)["choices"] for each in events]
    return "".join(each[0]["delta"].get("content") or "" for each in deltas if each)


def without_ids(event: bytes) -> object:
    decoded = json.loads(event)
    return {key: value for key, value in decoded.items() if key not in ("id", "created")}


def test_the_page_knows_the_limits_of_the_proxy() -> None:
    """nginx lets the largest body through, and waits longer than a stream is silent. Both close
    idle connections before the proxy does.
    """
    proxy, text = Config().proxy, snippet("nginx")

    (size_mb,) = re.findall(r"client_max_body_size (\d+)m;", text)
    (silence_s,) = re.findall(r"proxy_read_timeout (\d+)s;", text)
    (idle_s,) = re.findall(r"stream_idle_timeout: (\d+)s", snippet("Envoy"))
    assert int(size_mb) << 20 >= proxy.max_body_bytes
    assert min(int(silence_s), int(idle_s)) > 2 * KEEP_ALIVE_S
    (of_nginx_s,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    (of_envoy_s,) = re.findall(r"[{]idle_timeout: (\d+)s}", snippet("Envoy"))
    assert max(int(of_nginx_s), int(of_envoy_s)) < IDLE_TIMEOUT_S
