"""vLLM as it is: recovered both ways, in front of all the ways in which it dies, and named at start-up when it is another."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvrs.config import parse_config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.bodies import decode_call
from kvrs.proxy.backends.vllm import Named, VllmBackend
from kvrs.proxy.forms import CHAT, read
from kvrs.proxy.journal import Journal
from kvrs.proxy.server import Proxy
from tests.proxy.house import House
from tests.proxy.scripted import SECRET, Fault, Script
from tests.proxy.scripted_model import expected_ids
from tests.proxy.scripted_server import ScriptedServer
from tests.proxy.scripted_vllm import ScriptedVllm, VllmScript

PROMPT = [5, 6, 7]
TOKENS = 6
LONG = list(range(40))  # Two pages and a half.
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "torch_dtype": "bfloat16"}
ADDRESSES = {"p0": "n0", "d0": "n0", "d1": "n1"}
Servers = dict[str, ScriptedVllm]


class Vllms(House):
    """A proxy, one prefill and two decode servers."""

    shared: VllmScript
    servers: Servers

    async def ids(self, prompt: list[int] | str = PROMPT, **fields: Any) -> list[int]:
        asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "return_token_ids": True}
        status, body = await self.ask(asked | fields)
        assert status == 200, body
        *events, done, end = body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        return [i for event in events for c in json.loads(event[6:])["choices"] for i in c["token_ids"]]

    async def causes(self) -> list[tuple[str, str, str]]:
        return [(row["option"], row["from"], row["to"]) for row in (await self.state())["recoveries"]]


Builder = Callable[..., Awaitable[Vllms]]


@pytest.fixture
def vllm_model(model: str, tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_bytes((Path(model) / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def document(model: str, ports: dict[str, int], **sections: Any) -> dict[str, Any]:
    nodes = [
        {
            "id": node,
            "instances": [
                {"id": name, "role": "prefill" if name[0] == "p" else "decode", "port": ports[name]}
                for name, on in ADDRESSES.items()
                if on == node
            ],
        }
        for node in ("n0", "n1")
    ]
    proxy = {"port": 0, "admin_port": 0, "load_interval_s": 0.05} | sections.pop("proxy", {})
    return {
        "proxy": proxy,
        "cluster": {"backend": "vllm", "model": model, "nodes": nodes},
        "profiles": {"prefill": "opt-13b-a100-distserve-tp1"},
        **sections,
    }


@pytest.fixture
async def vllms(vllm_model: str) -> AsyncIterator[Builder]:
    """`await vllms(prepare=lambda servers: ..., wait=True, policy={...})`."""
    async with AsyncExitStack() as stack:

        async def make(
            prepare: Callable[[Servers], None] = lambda _: None,
            wait: bool = True,
            others: dict[str, ScriptedServer] | None = None,
            **sections: Any,
        ) -> Vllms:
            shared = VllmScript()
            servers = {
                name: ScriptedVllm(name, node, role="prefill" if name[0] == "p" else "decode", script=shared)
                for name, node in ADDRESSES.items()
            }
            prepare(servers)
            listening: dict[str, ScriptedServer] = {**servers, **(others or {})}
            for server in listening.values():
                await server.start()
                stack.push_async_callback(server.close)
            ports = {name: server.port for name, server in listening.items()}
            proxy = Proxy(parse_config(document(vllm_model, ports, **sections)), SECRET)
            await proxy.start()
            stack.push_async_callback(proxy.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            house = Vllms(proxy, Script(), {}, {}, http)
            house.shared, house.servers = shared, servers
            if wait:
                await house.until_health(p0="up", d0="up", d1="up")
                for server in servers.values():
                    server.bodies.clear()
            return house

        yield make


async def test_a_stream_is_vllms_own(vllms: Builder) -> None:
    """Prefill, hand-off with its own parameters, decode; nothing of ours reaches it: no bearer, no object, no client's params."""
    house = await vllms()

    ids = await house.ids(LONG, kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": []}, kvrs=None)

    prefill, decode = house.servers["p0"].bodies[0], house.servers["d0"].bodies[0]
    assert ids == expected_ids(LONG, TOKENS)
    assert prefill["kv_transfer_params"]["remote_block_ids"] is None
    assert decode["kv_transfer_params"]["remote_block_ids"] == [[1, 2, 3]]
    assert decode["prompt"] == LONG
    assert house.shared.violations == []
    assert house.servers["d0"].pulled == 1
    for server in house.servers.values():
        assert all("Authorization" not in headers for headers in server.headers)


async def test_several_ids_in_an_event_are_several_tokens(vllms: Builder) -> None:
    house = await vllms()
    house.shared.tokens_per_event = 4
    house.shared.faults = {4: Fault.RESET}

    assert await house.ids() == expected_ids(PROMPT, TOKENS)


@pytest.mark.parametrize("policy", ["auto", "always_migrate", "always_recompute", "rom"])
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.EOF, Fault.ERROR])
async def test_every_death_at_every_place_gives_the_same_ids(vllms: Builder, fault: Fault, policy: str) -> None:
    """Reset, the end of the response, and an error event with [DONE] behind it; every hand-off is pulled once."""
    house = await vllms(policy={"name": policy})

    for position in range(TOKENS):
        house.shared.faults = {position: fault}
        assert await house.ids() == expected_ids(PROMPT, TOKENS), position
        assert not house.shared.faults, "the fault happened"

    assert house.shared.violations == []


async def test_200_with_nothing_and_silence_are_deaths_too(vllms: Builder) -> None:
    house = await vllms(proxy={"token_gap_s": 0.2})

    house.shared.faults = {0: Fault.EMPTY}
    assert await house.ids() == expected_ids(PROMPT, TOKENS)
    house.shared.faults = {0: Fault.HANG}
    assert await house.ids() == expected_ids(PROMPT, TOKENS)


@pytest.mark.parametrize(("policy", "pulled"), [("always_migrate", 1), ("always_recompute", 0)])
async def test_the_two_ways_of_recovery(vllms: Builder, policy: str, pulled: int) -> None:
    """Migrate: the whole history at prefill again, and its hand-off to the other decode. Recompute: that one alone."""
    house = await vllms(policy={"name": policy})
    house.shared.prompt_tokens = len(LONG)
    house.shared.faults = {3: Fault.RESET}

    ids = await house.ids(LONG)

    expected = expected_ids(LONG, TOKENS)
    again = house.servers["d1"].bodies[0]
    assert ids == expected
    assert again["prompt"] == LONG + expected[:3]
    assert (again["max_tokens"], again["min_tokens"]) == (TOKENS - 3, 0)
    assert ("kv_transfer_params" in again, house.servers["d1"].pulled) == (bool(pulled), pulled)
    assert len(house.servers["p0"].bodies) == 1 + pulled
    assert await house.causes() == [(policy.removeprefix("always_"), "d0", "d1")]


async def test_a_hand_off_that_cannot_be_had_is_put_down_to_prefill(vllms: Builder) -> None:
    """Decode lives, and is used again; the prefill whose pages are gone is not."""
    house = await vllms(policy={"name": "always_migrate"})
    house.servers["p0"].transfer = {"remote_engine_id": "somebody who died"}

    assert await house.ids() == expected_ids(PROMPT, TOKENS)
    failures = [line for line in (await house.metrics()).splitlines() if line.startswith("kvrs_attempts_failed_total{")]
    assert failures == ['kvrs_attempts_failed_total{instance="p0"} 1.0']


async def test_a_hand_off_that_has_grown_old_is_not_used(vllms: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's blocks may be another stream's by then, and vLLM would not notice."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._HAND_OFF_S", -1.0)
    house = await vllms(policy={"name": "always_recompute"})

    assert await house.ids() == expected_ids(PROMPT, TOKENS)
    assert (house.servers["d0"].pulled, house.servers["d1"].pulled) == (0, 0)
    assert "too late to be used" in (await house.state())["recoveries"][0]["cause"]


async def test_an_engine_that_died_alone_is_lost_for_all_its_streams(vllms: Builder) -> None:
    """Its server still answers: `/health` says it."""
    house = await vllms()
    house.shared.gate, house.shared.gate_at = asyncio.Event(), 2
    asked = asyncio.create_task(house.ids())
    await house.until_streams_hold(2)

    house.servers["d0"].kill_engine()
    await house.until_health(d0="down")
    house.shared.gate.set()

    assert await asked == expected_ids(PROMPT, TOKENS)
    assert (await house.causes())[0][1:] == ("d0", "d1")


async def test_an_idle_server_that_dies_is_missed_at_once(vllms: Builder) -> None:
    """Not at the next poll, which is an hour away: by the connection on which nothing is said."""
    house = await vllms(wait=False, proxy={"load_interval_s": 60})
    await house.until_health(p0="up", d0="up", d1="up")

    await house.servers["d1"].kill()

    await house.until_health(d1="down")


async def test_another_process_is_another_epoch(vllms: Builder) -> None:
    """Told apart by when it started."""
    house = await vllms()
    before = {row["id"]: row["epoch"] for row in (await house.state())["instances"]}

    await house.servers["d0"].kill()
    await house.until_health(d0="down")
    await house.servers["d0"].restart()
    await house.until_health(d0="up")

    after = {row["id"]: row["epoch"] for row in (await house.state())["instances"]}
    assert after["d0"] > before["d0"]
    assert {name for name in after if after[name] != before[name]} == {"d0"}


async def test_the_same_process_is_used_again_when_it_has_run_dry(vllms: Builder) -> None:
    """It cannot be fenced: what it may still be writing has to end first."""
    house = await vllms()
    driver = house.proxy._driver
    assert driver is not None
    house.servers["d0"].running = 1
    house.servers["d0"].kill_engine()
    await house.until_health(d0="down")
    house.shared.engines.add(house.servers["d0"].engine)

    await asyncio.sleep(0.2)
    assert (await house.health())["d0"] == "down"

    house.servers["d0"].running = 0
    await house.until_health(d0="up")


async def test_load_is_what_metrics_say(vllms: Builder) -> None:
    """Requests ahead, each for as long as a prefill has taken on the average."""
    house = await vllms(prepare=lambda servers: setattr(servers["p0"], "waiting", 3))

    p0 = (await house.state())["instances"][0]

    assert p0["load"] | {"epoch": 0, "links": []} == p0["load"] | {
        "epoch": 0,
        "links": [],
        "queued": 3,
        "running": 0,
        "free_pages": 75,
        "queue_delay_s": 0.75,
    }


async def test_what_the_client_did_wrong_is_told_to_the_client(vllms: Builder) -> None:
    """vLLM finds it out after its status has gone out, and says so in an event."""
    house = await vllms()
    house.shared.faults = {0: Fault.GARBAGE}

    status, body = await house.ask({"prompt": PROMPT, "temperature": 0, "stream": True})

    assert status == 400
    assert msgspec.json.decode(body)["error"]["message"] == "Token id 600 is out of vocabulary"
    assert (await house.state())["recoveries"] == []


async def test_its_own_key_is_sent_where_there_is_one(vllms: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRS_VLLM_API_KEY", "of vllm")

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.api_key = "of vllm"

    house = await vllms(prepare=prepare)

    assert {headers["Authorization"] for server in house.servers.values() for headers in server.headers} == {"Bearer of vllm"}


# Bad input, named when it comes up.


class _Other(ScriptedServer):
    """Something else listens there."""

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/", self._hello)

    async def _hello(self, _: web.Request) -> web.Response:
        return web.Response(text="hello")


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no connector": ("d0", {"connector": False}, "started without a NixlConnector, which role 'decode' needs"),
    "no parameters": ("p0", {"lacks": {"kv_transfer_params"}}, "without kv_transfer_params"),
    "old prefill": (
        "p0",
        {"lacks": {"prompt_token_ids"}},
        "without prompt_token_ids: its version does not know return_token_ids",
    ),
    "old decode": ("d0", {"lacks": {"prompt_token_ids"}}, "a stream came without prompt_token_ids"),
    "no ids": ("d0", {"lacks": {"token_ids"}}, "a stream came without"),
    "no start": ("d0", {"lacks": {"process_start_time"}}, "its /metrics lack process_start_time_seconds"),
    "no load": ("d0", {"lacks": {"num_requests_running"}}, "its /metrics lack vllm:num_requests_running"),
    "no cache": ("d0", {"lacks": {"cache_config_info"}}, "its /metrics lack vllm:cache_config_info"),
    "a missing field": ("p0", {"transfer": {"remote_request_id": ...}}, "missing required field `remote_request_id`"),
    "push": ("p0", {"transfer": {"transfer_mode": "push"}}, "transfer_mode is 'push'"),
    "no blocks": ("p0", {"transfer": {"remote_block_ids": []}}, "kv_transfer_params"),
    "a key": ("d0", {"api_key": "secret"}, "its --api-key is not what the proxy's environment has in KVRS_VLLM_API_KEY"),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_a_server_that_lacks_something_is_named(vllms: Builder, what: str) -> None:
    """Refused when it comes up, not at the first failure of a stream."""
    name, changes, said = CHANGES[what]

    def prepare(servers: Servers) -> None:
        for field, value in changes.items():
            setattr(servers[name], field, value)

    house = await vllms(prepare=prepare, wait=False)

    await house.until_health(**{name: "refused"})
    row = next(row for row in (await house.state())["instances"] if row["id"] == name)
    assert said in row["reason"]


async def test_something_else_that_listens_there_is_named(vllms: Builder) -> None:
    house = await vllms(wait=False, others={"d0": _Other("d0", "n0")})

    await house.until_health(d0="refused")
    assert "it is no vLLM that speaks there: HTTP 404" in (await house.state())["instances"][1]["reason"]


class _NoHttp(ScriptedServer):
    """A port of another kind."""

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read(1)
            writer.write(b"-ERR unknown command\r\n")
        writer.close()

    async def close(self) -> None:
        self._listener.close()
        await self._listener.wait_closed()


async def test_what_is_no_http_is_named(vllms: Builder) -> None:
    house = await vllms(wait=False, others={"d0": _NoHttp("d0", "n0")})

    await house.until_health(d0="refused")
    assert "what it speaks is no HTTP" in (await house.state())["instances"][1]["reason"]


@pytest.mark.parametrize(("field", "value"), [("model", "large"), ("root", "/models/other"), ("version", "0.31.0")])
async def test_prefill_and_decode_of_different_models_are_named(vllms: Builder, field: str, value: str) -> None:
    """Whichever of them comes up second."""
    house = await vllms(prepare=lambda servers: setattr(servers["d0"], field, value), wait=False)

    async def one_is_refused() -> bool:
        return "refused" in (await house.health()).values()

    await house.until(one_is_refused)
    reasons = [row["reason"] for row in (await house.state())["instances"] if row["health"] == "refused"]
    assert value in reasons[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profiles": {}}, "profiles.prefill: missing with backend 'vllm'"),
        ({"backup": {"mode": "local"}}, "backup.mode: got 'local' with backend 'vllm'"),
        (
            {"cluster": {"backend": "vllm", "nodes": document("", dict.fromkeys(ADDRESSES, 1))["cluster"]["nodes"]}},
            "cluster.model",
        ),
    ],
)
def test_what_vllm_cannot_say_itself_must_be_configured(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(document("/model", {"p0": 1, "d0": 2, "d1": 3}) | change)


async def test_a_chat_without_a_limit_has_none_after_a_cut_either(vllms: Builder, vllm_model: str) -> None:
    """It goes on as a completion, of which vLLM makes 16 tokens unless it is told otherwise, and none at all of a null."""
    house = await vllms()
    asked = read(CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 0, "stream": true}')
    journal = Journal(StreamId("A"), asked, 0.0, prompt_ids=PROMPT, output_ids=[8])
    server = house.servers["d1"]
    async with aiohttp.ClientSession() as session:
        named = Named(InstanceId("d1"), NodeId("n1"), Role.DECODE, vllm_model)
        backend = VllmBackend(session, f"http://127.0.0.1:{server.port}", named)
        await backend.info()
        async with backend.decode(decode_call(journal, 2, (), (), None, exact=False)) as chunks:
            assert await anext(chunks)

    assert server.bodies[-1]["prompt"] == [*PROMPT, 8]
    assert server.bodies[-1]["max_tokens"] == 4096 - len(PROMPT) - 1
