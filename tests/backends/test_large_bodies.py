"""Large bodies at a real proxy and a real engine."""

import asyncio
import io
import json
import re
from collections.abc import Iterator

import aiohttp
import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.protocol.openai.decoding import MAX_ELEMENTS
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of
from kvrs_testkit.processes import Processes
from kvrs_testkit.sse import events_of

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("systems")]

BODY_BYTES = 8 << 20
AT_ONCE = 4  # At the proxy, and as many at the engine.
STREAM = {"prompt": "ka lo mi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def chat(**fields: str) -> bytes:
    """A chat of 8 MB at most, of fields that are JSON already."""
    given = {"messages": '[{"role":"user","content":"a"}]', "max_tokens": "4"} | fields
    body = "{" + ",".join(f'"{name}":{value}' for name, value in given.items()) + "}"
    assert len(body) <= BODY_BYTES
    return body.encode()


def listed(value: str, times: int) -> str:
    return "[" + ",".join([value] * times) + "]"


LONG = f'"{"b" * 100}"'
# The first two have as many values as there is room for; the next two as many as an engine allows,
# and more than the model takes; the last one has few.
BODIES = {
    "tools": chat(tools=listed('{"a":1}', 1_000_000)),
    "messages": chat(messages=listed('{"role":"user","content":"a"}', 270_000)),
    "large tools": chat(tools=listed(f'{{"a":{LONG}}}', MAX_ELEMENTS - 100)),
    "large arguments": chat(
        chat_template_kwargs=f'{{"a":{listed(f"[{LONG}]", MAX_ELEMENTS - 100)}}}'
    ),
    "text": chat(messages=f'[{{"role":"user","content":"{"b" * 8_000_000}"}}]'),
}


@pytest.fixture(scope="module")
def proxy(processes: Processes) -> Iterator[ProxySettings]:
    """A second proxy without a tokenizer: it cannot tell how many bytes the model takes, and works
    on them all.
    """
    config = processes.config
    port, admin_port = free_ports(2)
    ports = {"port": port, "admin_port": admin_port}
    alone = config.model_copy(
        update={
            "proxy": config.proxy.model_copy(update=ports),
            "cluster": config.cluster.model_copy(update={"model": None}),
        }
    )
    processes.start_proxy(alone, "proxy-without-tokenizer")
    yield alone.proxy
    processes.kill("proxy-without-tokenizer")


async def deaths(http: aiohttp.ClientSession, admin: str) -> float:
    """Instances that the proxy has lost."""
    async with http.get(f"{admin}/metrics") as response:
        counts = re.findall(r"^kvrs_worker_deaths_total{.*} (\S+)", await response.text(), re.M)
    assert counts
    return sum(map(float, counts))


async def streamed(http: aiohttp.ClientSession, url: str) -> str:
    async with http.post(f"{url}/v1/completions", json=STREAM | {"stream": True}) as response:
        *events, done, nothing = events_of(await response.read())
    assert (done, nothing) == (b"data: [DONE]", b"")
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)


@pytest.mark.parametrize(
    ("name", "at_proxy", "at_engine"),
    [
        ("tools", 400, 400),
        ("messages", 400, 400),
        ("large tools", 400, 400),
        ("large arguments", 400, 200),
        ("text", 400, 400),
    ],
)
async def test_large_bodies_cost_no_instance_and_no_other_stream(
    processes: Processes, proxy: ProxySettings, name: str, at_proxy: int, at_engine: int
) -> None:
    """They are parsed and rendered beside the event loop, of the proxy and of the engine, so that
    streams and load reports go on.
    """
    url = f"http://{proxy.host}:{proxy.port}"
    admin = f"http://{proxy.admin_host}:{proxy.admin_port}"
    (engine,) = (each.url for _, each in processes.config.cluster.instances() if each.id == "p0")
    key = scoped_key(processes.secret, Scope.INSTANCE, "p0")

    async with aiohttp.ClientSession() as http, client_of(engine, key) as inner:

        async def send(to: str) -> int:
            data = io.BytesIO(BODIES[name])
            client, base = (inner, "") if to == engine else (http, to)
            async with client.post(f"{base}/v1/chat/completions", data=data) as response:
                return response.status

        expected, before = await streamed(http, url), await deaths(http, admin)
        sending = asyncio.gather(*(send(to) for to in (url, engine) for _ in range(AT_ONCE)))
        answers = [await streamed(http, url)]
        while not sending.done():
            answers.append(await streamed(http, url))
            assert await deaths(http, admin) == before

        assert set(await sending) == {at_proxy, at_engine}
        assert set(answers) == {expected}
        assert await deaths(http, admin) == before
