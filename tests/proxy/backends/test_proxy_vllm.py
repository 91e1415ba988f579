"""vLLM behind a proxy: recovery by both options after every kind of death, and faults of the set-up
named at start-up.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.cli.findings import Level, ProxyAnswer, exactness_findings
from kvrs.core.model import actions as act
from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.instance import Role
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.backends.bodies import decode_call
from kvrs.proxy.backends.model_files import ModelFiles
from kvrs.proxy.backends.stock_facts import ConfiguredIdentity
from kvrs.proxy.backends.vllm import VllmBackend
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, read
from kvrs.proxy.wire.upstream import Access, EngineLinks, EventReader
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_server import ScriptedServer
from kvrs_testkit.scripted_vllm import REFUSED
from kvrs_testkit.vllm_cluster import LONG, PROMPT, TOKENS, Builder, Servers


async def test_a_stream_is_vllms_own(vllms: Builder) -> None:
    """Prefill, hand-off with its own parameters, decode; nothing of kvrs reaches it: no bearer
    token, no `kvrs` field, no client's parameters.
    """
    system = await vllms()

    ids = await system.ids(
        LONG, kv_transfer_params={"do_remote_prefill": True, "remote_block_ids": []}, kvrs=None
    )

    prefill, decode = system.servers["p0"].bodies[0], system.servers["d0"].bodies[0]
    assert ids == expected_ids(LONG, TOKENS)
    assert prefill["kv_transfer_params"]["remote_block_ids"] is None
    assert decode["kv_transfer_params"]["remote_block_ids"] == [[1, 2, 3]]
    assert decode["prompt"] == LONG
    assert system.shared.violations == []
    assert system.servers["d0"].pulled == 1
    for server in system.servers.values():
        assert all("Authorization" not in headers for headers in server.headers)


async def test_several_ids_in_an_event_are_several_tokens(vllms: Builder) -> None:
    system = await vllms()
    system.shared.tokens_per_event = 4
    system.shared.faults = {4: Fault.RESET}

    assert await system.ids() == expected_ids(PROMPT, TOKENS)


@pytest.mark.parametrize("policy", ["auto", "always_migrate", "always_recompute", "rom"])
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.EOF, Fault.ERROR])
async def test_every_death_at_every_place_gives_the_same_ids(
    vllms: Builder, fault: Fault, policy: str
) -> None:
    """Reset, the end of the response, and an error event with [DONE] behind it; every hand-off is
    pulled once.
    """
    system = await vllms(policy={"name": policy})

    for position in range(TOKENS):
        system.shared.faults = {position: fault}
        assert await system.ids() == expected_ids(PROMPT, TOKENS), position
        assert not system.shared.faults, "the fault happened"

    assert system.shared.violations == []


async def test_200_with_nothing_and_silence_are_deaths_too(vllms: Builder) -> None:
    system = await vllms(proxy={"token_gap_s": 0.5})

    system.shared.faults = {0: Fault.EMPTY}
    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    system.shared.faults = {0: Fault.HANG}
    assert await system.ids() == expected_ids(PROMPT, TOKENS)


@pytest.mark.parametrize(("policy", "pulled"), [("always_migrate", 1), ("always_recompute", 0)])
async def test_the_two_ways_of_recovery(vllms: Builder, policy: str, pulled: int) -> None:
    """Migrate: the whole history at prefill again, and its hand-off to the other decode. Recompute:
    that one alone.
    """
    system = await vllms(policy={"name": policy})
    system.shared.prompt_tokens = len(LONG)
    system.shared.faults = {3: Fault.RESET}

    ids = await system.ids(LONG)

    expected = expected_ids(LONG, TOKENS)
    again = system.servers["d1"].bodies[0]
    assert ids == expected
    assert again["prompt"] == LONG + expected[:3]
    assert (again["max_tokens"], again["min_tokens"]) == (TOKENS - 3, 0)
    assert ("kv_transfer_params" in again, system.servers["d1"].pulled) == (bool(pulled), pulled)
    assert len(system.servers["p0"].bodies) == 1 + pulled
    assert await system.causes() == [(policy.removeprefix("always_"), "d0", "d1")]


async def test_a_hand_off_that_fails_counts_against_prefill(vllms: Builder) -> None:
    """Decode is used again; the prefill instance whose pages are gone is not."""
    system = await vllms(policy={"name": "always_migrate"})
    system.servers["p0"].transfer = {"remote_engine_id": "an engine that died"}

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert await system.count("kvrs_attempts_failed_total", worker="p0") == 1
    assert await system.count("kvrs_attempts_failed_total") == 1


async def test_a_prefill_that_hands_nothing_over_is_no_fault(vllms: Builder) -> None:
    """Some connectors have nothing of a request that its one token has ended. Decode computes the
    prompt, and nobody is blamed.
    """
    system = await vllms()
    system.servers["p0"].ends_at_once = (PROMPT,)

    for _ in range(4):
        assert await system.ids() == expected_ids(PROMPT, TOKENS)

    asked = system.servers["p0"].bodies
    assert len(asked) == 4
    assert all(body["ignore_eos"] for body in asked), "a hand-off is had where that is possible"
    assert not any("kv_transfer_params" in body for body in system.servers["d0"].bodies)
    assert await system.count("kvrs_attempts_failed_total") == 0
    rows = (await system.state())["instances"]
    assert not any(row["answers"]["failures_in_a_row"] for row in rows)


async def test_a_hand_off_that_has_grown_old_is_not_used(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill's blocks may be another stream's by then, and vLLM would not notice."""
    monkeypatch.setattr("kvrs.proxy.backends.vllm._HAND_OFF_S", -1.0)
    system = await vllms(policy={"name": "always_recompute"})

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert not any(
        "kv_transfer_params" in body and body["max_tokens"] > 1
        for name in ("d0", "d1")
        for body in system.servers[name].bodies
    ), "nothing but the request that frees its blocks has it"
    assert "too late to be used" in (await system.state())["recoveries"][0]["cause"]


async def test_an_engine_that_died_alone_is_lost_for_all_its_streams(vllms: Builder) -> None:
    """Its server still answers, and `/health` reports it."""
    system = await vllms()
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.ids())
    await system.until_streams_hold(2)

    system.servers["d0"].kill_engine()
    await system.until_health(d0="down")
    system.shared.gate.set()

    assert await task == expected_ids(PROMPT, TOKENS)
    assert (await system.causes())[0][1:] == ("d0", "d1")


async def test_the_death_of_an_idle_server_is_noticed_at_once(vllms: Builder) -> None:
    """By the end of the idle connection: the next poll is an hour away."""
    system = await vllms(wait=False, proxy={"load_interval_s": 60})
    await system.until_health(p0="up", d0="up", d1="up")

    await system.servers["d1"].kill()

    await system.until_health(d1="down")


async def test_another_process_is_another_epoch(vllms: Builder) -> None:
    """The start time distinguishes them."""
    system = await vllms()
    before = {row["id"]: row["epoch"] for row in (await system.state())["instances"]}

    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    await system.servers["d0"].restart()
    await system.until_health(d0="up")

    after = {row["id"]: row["epoch"] for row in (await system.state())["instances"]}
    assert after["d0"] > before["d0"]
    assert {name for name in after if after[name] != before[name]} == {"d0"}


async def test_the_same_process_is_used_again_when_it_has_run_dry(vllms: Builder) -> None:
    """It cannot be fenced: what it may still be writing has to end first."""
    system = await vllms()
    system.servers["d0"].running = 1
    system.servers["d0"].kill_engine()
    await system.until_health(d0="down")
    system.shared.engines.add(system.servers["d0"].engine)

    await asyncio.sleep(0.2)
    assert (await system.health())["d0"] == "down"

    system.servers["d0"].running = 0
    await system.until_health(d0="up")


async def test_drafts_of_its_own_are_shown(vllms: Builder) -> None:
    """In the state, and as a metric beside those of other engines."""
    system = await vllms(prepare=lambda servers: setattr(servers["d0"], "drafts", (5, 20, 7)))

    rows = {row["id"]: row for row in (await system.state())["instances"]}
    metrics = await system.metrics()

    found = rows["d0"]["speculation"]
    assert (found["source"], found["steps"], found["proposed"], found["accepted"]) == (
        "engine",
        5,
        20,
        7,
    )
    assert rows["p0"]["speculation"] is None
    assert 'kvrs_draft_tokens_total{outcome="accepted",source="engine",worker="d0"} 7.0' in metrics


async def test_load_is_read_from_metrics(vllms: Builder) -> None:
    """Requests ahead, each for as long as a prefill has taken on the average."""
    system = await vllms(prepare=lambda servers: setattr(servers["p0"], "waiting", 3))

    p0 = (await system.state())["instances"][0]

    assert p0["load"] | {"epoch": 0, "links": []} == p0["load"] | {
        "epoch": 0,
        "links": [],
        "queued": 3,
        "running": 0,
        "free_pages": 75,
        "queue_delay_s": 0.75,
    }


async def test_a_client_s_fault_is_reported_to_the_client(vllms: Builder) -> None:
    """vLLM finds the fault after it has sent the status, and reports it in an event, with the field
    and all. There is no second decode instance to ask.
    """
    system = await vllms()
    await system.servers["d1"].kill()
    await system.until_health(d1="down")
    system.shared.faults = {0: Fault.GARBAGE}

    status, body = await system.ask({"prompt": PROMPT, "temperature": 0, "stream": True})

    assert status == 400
    form = {"type": "invalid_request_error", "code": None}
    assert msgspec.json.decode(body) == {"error": REFUSED | form}
    assert (await system.state())["recoveries"] == []


async def test_its_own_key_is_sent_where_there_is_one(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRS_VLLM_API_KEY", "of vllm")

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.api_key = "of vllm"

    system = await vllms(prepare=prepare)

    assert {
        headers["Authorization"] for server in system.servers.values() for headers in server.headers
    } == {"Bearer of vllm"}


async def test_a_key_that_is_not_taken_any_more_is_an_error_at_once(vllms: Builder) -> None:
    """No instance that still answers /health is tried again and again, and none is called ready.
    The request counts as failed: operators are told, by an alert too.
    """
    system = await vllms()
    request = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    for server in system.servers.values():
        server.denies = 403

    async with system.http.post(f"{system.url}/v1/completions", json=request) as response:
        status, body, headers = response.status, await response.read(), response.headers

    assert (status, msgspec.json.decode(body)["error"]["code"]) == (502, "denied")
    assert "Retry-After" not in headers
    assert b"p0: HTTP 403 to a completion, by itself or a gateway in front" in body
    assert [body["prompt"] for body in system.servers["p0"].bodies].count(PROMPT) == 1
    await system.until_health(p0="refused")
    given_up = {
        reason: await system.count("kvrs_streams_given_up_total", reason=reason)
        for reason in ("denied", "refused")
    }
    assert given_up == {"denied": 1, "refused": 0}
    assert await system.count("kvrs_attempts_failed_total", worker="p0") == 1
    assert await system.count("kvrs_requests_total", outcome="failed") == 1


async def test_a_request_that_alone_is_denied_blames_no_instance(vllms: Builder) -> None:
    """A gateway may deny what a prompt says. One client must not take the cluster away from all."""
    system = await vllms()
    for server in system.servers.values():
        server.denies, server.denies_beyond_tokens = 403, len(PROMPT)

    status, body = await system.ask({"prompt": LONG, "temperature": 0, "stream": True})

    assert status == 403
    assert b"not for you" in body
    assert await system.ids() == await system.ids()
    assert set((await system.health()).values()) == {"up"}


async def test_what_is_refused_everywhere_is_told_at_once(vllms: Builder) -> None:
    """Nothing that a client could wait for comes up by itself; `/readyz` says what to mend."""

    def deny(servers: Servers) -> None:
        for server in servers.values():
            server.denies = 401

    system = await vllms(prepare=deny, wait=False)
    await system.until_health(p0="refused", d0="refused", d1="refused")

    status, body = await system.ask({"prompt": PROMPT, "stream": True})
    async with system.http.get(f"{system.url}/readyz") as response:
        ready = response.status, await response.text()
    for server in system.servers.values():
        server.denies = None
    await system.until_health(p0="up", d0="up", d1="up")

    assert (status, msgspec.json.decode(body)["error"]["code"]) == (503, "no_instance")
    assert b"no instance can be used: p0: HTTP 401 to a completion" in body
    assert ready[0] == 503
    assert "d1: HTTP 401 to a completion" in ready[1]
    assert len(await system.ids()) == TOKENS


async def test_a_missing_tokenizer_is_seen_wherever_an_operator_looks(
    vllms: Builder, vllm_model: str
) -> None:
    """In the state, of which the live page and `kvrs doctor` are made, and as a series to alert
    on.
    """
    whole = await vllms()
    seen = (await whole.state())["proxies"][0]["lacks_tokenizer"]
    counted = await whole.count("kvrs_tokenizer_missing")
    (Path(vllm_model) / "tokenizer.json").unlink()

    system = await vllms()
    state = await system.state()
    admin = f"http://127.0.0.1:{system.proxy.admin_port}"
    async with system.http.get(f"{admin}/kvrs/v1/overview") as response:
        overview = await response.json()
    findings = [*exactness_findings(ProxyAnswer(admin, state))]

    assert (seen, counted) == (False, 0)
    assert state["proxies"][0]["lacks_tokenizer"]
    assert overview["proxies"][0]["lacks_tokenizer"]
    assert await system.count("kvrs_tokenizer_missing") == 1
    assert [each.level for each in findings] == [Level.FAILURE]
    assert f"no tokenizer.json in {vllm_model}" in findings[0].value


# Bad input, named when it comes up.


class _Other(ScriptedServer):
    """Something else listens there."""

    def add_routes(self, routes: Routes) -> None:
        routes.add("GET", "/", self._hello)

    async def _hello(self, _: Request) -> Response:
        return Response(body=b"hello")


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no connector": (
        "d0",
        {"connector": False},
        "started without a NixlConnector, which role 'decode' needs",
    ),
    "no parameters": ("p0", {"lacks": {"kv_transfer_params"}}, "without kv_transfer_params"),
    "old prefill": (
        "p0",
        {"lacks": {"prompt_token_ids"}},
        "without prompt_token_ids: its version does not support return_token_ids",
    ),
    "old decode": ("d0", {"lacks": {"prompt_token_ids"}}, "a stream came without prompt_token_ids"),
    "no ids": ("d0", {"lacks": {"token_ids"}}, "a stream came without"),
    "no load": (
        "d0",
        {"lacks": {"num_requests_running"}},
        "its /metrics lack vllm:num_requests_running",
    ),
    "no cache": (
        "d0",
        {"lacks": {"cache_config_info"}},
        "its /metrics lack vllm:cache_config_info",
    ),
    "a missing field": (
        "p0",
        {"transfer": {"remote_request_id": ...}},
        "missing required field `remote_request_id`",
    ),
    "push": ("p0", {"transfer": {"transfer_mode": "push"}}, "transfer_mode is 'push'"),
    "no blocks": ("p0", {"transfer": {"remote_block_ids": []}}, "kv_transfer_params"),
    "a key": (
        "d0",
        {"api_key": "secret"},
        "its --api-key is not what the proxy's environment has in KVRS_VLLM_API_KEY",
    ),
    "a key of completions": (
        "d0",
        {"denies": 401},
        "HTTP 401 to a completion, by itself or a gateway in front of it: its --api-key",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
async def test_a_server_that_lacks_something_is_named(vllms: Builder, what: str) -> None:
    """Refused when it comes up, not at the first failure of a stream."""
    name, changes, said = CHANGES[what]

    def prepare(servers: Servers) -> None:
        for field, value in changes.items():
            setattr(servers[name], field, value)

    system = await vllms(prepare=prepare, wait=False)

    await system.until_health(**{name: "refused"})
    row = next(row for row in (await system.state())["instances"] if row["id"] == name)
    assert said in row["reason"]


async def test_something_else_that_listens_there_is_named(vllms: Builder) -> None:
    system = await vllms(wait=False, others={"d0": _Other("d0", "n0")})

    await system.until_health(d0="refused")
    assert (
        "another server than vLLM answers there: HTTP 404"
        in (await system.state())["instances"][1]["reason"]
    )


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
    system = await vllms(wait=False, others={"d0": _NoHttp("d0", "n0")})

    await system.until_health(d0="refused")
    assert "its answer is not HTTP" in (await system.state())["instances"][1]["reason"]


@pytest.mark.parametrize(("field", "value"), [("model", "large"), ("root", "/models/other")])
async def test_prefill_and_decode_of_different_models_are_named(
    vllms: Builder, field: str, value: str
) -> None:
    """Whichever of them comes up second."""
    system = await vllms(prepare=lambda servers: setattr(servers["d0"], field, value), wait=False)

    async def one_is_refused() -> bool:
        return "refused" in (await system.health()).values()

    await system.until(one_is_refused)
    reasons = [
        row["reason"] for row in (await system.state())["instances"] if row["health"] == "refused"
    ]
    assert value in reasons[0]


async def test_a_chat_without_a_limit_has_none_after_a_cut_either(
    vllms: Builder, vllm_model: str
) -> None:
    """The chat is continued as a completion, which vLLM limits to 16 tokens by default, and rejects
    with a null.
    """
    system = await vllms()
    parsed = read(
        CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 0, "stream": true}'
    )
    journal = Journal(StreamId("A"), parsed, 0.0, prompt_ids=PROMPT, output_ids=packed([8]))
    server = system.servers["d1"]
    async with EngineLinks(Access()) as links:
        named = ConfiguredIdentity(
            InstanceId("d1"), NodeId("n1"), Role.DECODE, ModelFiles(vllm_model)
        )
        backend = VllmBackend(links, f"http://127.0.0.1:{server.port}", named, b"")
        member = Member.of(await backend.info())
        events = EventReader()
        await backend.decode(decode_call(journal, 2, act.Plan(member.id), member), events)

    assert events.payloads[-1] == b"[DONE]"

    assert server.bodies[-1]["prompt"] == [*PROMPT, 8]
    assert server.bodies[-1]["max_tokens"] == 4096 - len(PROMPT) - 1
