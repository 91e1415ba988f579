"""SGLang behind a proxy: its two legs, every death of either, its chats, and faults of the set-up
named at start-up.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from kvrs.profiles.guess import STEP_S
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids, ids_of, vocabulary
from kvrs_testkit.sglang_cluster import PROMPT, TOKENS, Servers, Sglangs
from kvrs_testkit.sse import events_of

Builder = Callable[..., Awaitable[Sglangs]]
LONG = list(range(40))


def chat_ids(content: str, count: int = TOKENS) -> list[int]:
    return expected_ids(ids_of(f"user: {content}\n"), count)


async def test_both_legs_get_the_same_request_and_meet_in_a_new_room(sglangs: Builder) -> None:
    """Nothing of kvrs reaches them: no bearer token, and no field of its own."""
    system = await sglangs()

    ids = await system.ids(LONG), await system.ids(LONG)

    rooms = list(system.shared.rooms.values())
    assert ids == (expected_ids(LONG, TOKENS),) * 2
    assert [sorted(room.bodies) for room in rooms] == [["decode", "prefill"]] * 2
    assert all(room.bodies["decode"]["stream"] for room in rooms)
    assert all("kvrs" not in room.bodies["decode"] for room in rooms)
    assert system.shared.violations == []
    for server in system.servers.values():
        assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize("policy", ["auto", "always_migrate", "always_recompute", "rom"])
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.EOF, Fault.ERROR, Fault.DONE_ONLY])
async def test_every_death_at_every_place_gives_the_same_ids(
    sglangs: Builder, fault: Fault, policy: str
) -> None:
    """Reset, the end of the response, an error event, and an abort that ends like a finish."""
    system = await sglangs(policy={"name": policy})

    for position in range(TOKENS):
        system.shared.faults = {position: fault}
        assert await system.ids() == expected_ids(PROMPT, TOKENS), position
        assert not system.shared.faults, "the fault happened"

    assert system.shared.violations == []
    await system.until(lambda: _is_true(system.open_legs == 0))


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["before", "in", "after"])
async def test_the_death_of_a_leg_closes_the_other_one(
    sglangs: Builder, dies: str, moment: str
) -> None:
    """Before, in and after the transfer; the stream goes on in another room."""
    system = await sglangs()
    times = {"before": (30.0, 0.0), "in": (0.0, 30.0), "after": (0.0, 0.0)}
    system.shared.compute_s, system.shared.transfer_s = times[moment]
    if moment == "after":
        system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    stream = asyncio.create_task(system.ids())
    await system.until(lambda: _is_true(system.open_legs == (1 if moment == "after" else 2)))
    (first,) = system.shared.rooms.values()

    system.shared.compute_s = system.shared.transfer_s = 0.0
    victim = next(
        server
        for server in system.servers.values()
        if server.role == dies and first.bodies[dies] in server.bodies
    )
    survivor = next(
        server
        for server in system.servers.values()
        if server.role != dies and first.bodies[server.role] in server.bodies
    )
    await victim.kill()
    if moment == "after":
        assert system.shared.gate is not None
        system.shared.gate.set()

    assert await stream == expected_ids(PROMPT, TOKENS)
    assert system.shared.violations == []
    again = moment != "after" or dies == "decode"
    assert len(system.shared.rooms) == 1 + again
    await system.until(lambda: _is_true(survivor.legs == 0))


async def test_a_prefill_server_is_met_again_by_the_same_decode(sglangs: Builder) -> None:
    """Which caches the ports of its former process under its address: pairs would hang. The
    address is the same for all attempts at one process.
    """

    def prepare(servers: Servers) -> None:
        del servers["p1"]

    system = await sglangs(prepare)
    server, *decodes = system.servers.values()
    prompts = [[number, 8, 9] for number in range(6)]
    await asyncio.gather(*map(system.ids, prompts))
    addresses = {address for decode in decodes for address in decode.met}

    await server.kill()
    await system.until_health(p0="down")
    await server.restart()
    await system.until_health(p0="up")

    ids = await asyncio.gather(*map(system.ids, prompts))
    assert ids == [expected_ids(prompt, TOKENS) for prompt in prompts]
    assert len(addresses) == 1


@pytest.mark.parametrize("transfer_s", [0.0, 0.05])
async def test_what_the_cache_of_prefill_had_feeds_the_index(
    sglangs: Builder, transfer_s: float
) -> None:
    """Its own usage says so, also where the client wants none."""

    def prepare(servers: Servers) -> None:
        del servers["p1"]
        servers["p0"].reused_tokens = 32

    system = await sglangs(prepare)
    system.shared.transfer_s = transfer_s

    events = await system.events(prompt=LONG, return_token_ids=True)

    async def is_counted() -> bool:
        rows = {row["id"]: row for row in (await system.state())["instances"]}
        return bool(rows["p0"]["prefix_hits"])

    await system.until(is_counted)
    rows = {row["id"]: row for row in (await system.state())["instances"]}
    assert rows["p0"]["prefix_hits"] == {"prompt_tokens": 40, "cached_tokens": 32, "share": 0.8}
    assert rows["d0"]["prefix_hits"] is rows["d1"]["prefix_hits"] is None
    assert not any(event.get("usage") for event in events)


async def test_no_stream_counts_as_unprotected_where_servers_keep_pages_by_themselves(
    sglangs: Builder,
) -> None:
    """A proxy orders none to be kept; alerts would never end."""
    system = await sglangs(backup={"mode": "local"})
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    stream = asyncio.create_task(system.ids())
    await system.until_streams_hold(2)

    (row,) = (await system.state())["streams"]
    assert (row["protected"], row["unprotected"]) == ({}, "SGLang keeps KV by itself")
    metrics = await system.metrics()
    assert "kvrs_streams_unprotected 0.0" in metrics
    assert 'kvrs_worker_unprotected{worker="d0"} 0.0' in metrics

    system.shared.gate.set()
    assert await stream == expected_ids(PROMPT, TOKENS)


async def test_a_prefill_that_hangs_is_left(sglangs: Builder) -> None:
    """Its decode alone would wait for minutes; no leg is left open."""
    system = await sglangs(proxy={"token_gap_s": 0.5})
    system.shared.compute_s = 0.0
    for name in ("p0", "p1"):
        if name != "p1":
            system.servers[name].freeze()

    ids = await asyncio.gather(*(system.ids([number, 8, 9]) for number in range(4)))

    assert ids == [expected_ids([number, 8, 9], TOKENS) for number in range(4)]
    system.servers["p0"].thaw()
    await system.until(lambda: _is_true(system.open_legs == 0))


async def test_no_more_pairs_run_than_decode_has_room_for(sglangs: Builder) -> None:
    """A prefill that waited for its decode would hold its memory, and give up at last. What waits
    is served, or goes as its client does.
    """

    def prepare(servers: Servers) -> None:
        del servers["d1"]
        servers["d0"].max_running = 2

    system = await sglangs(prepare)
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    streams = [asyncio.create_task(system.ids([number, 8, 9])) for number in range(5)]
    await system.until_streams_hold(2, count=2)
    await asyncio.sleep(0.1)
    assert system.open_legs == len(system.shared.rooms) == 2

    async def are_told() -> bool:  # Else their silence would be that of the server.
        rows = {row["id"]: row for row in (await system.state())["instances"]}
        return bool(rows["d0"]["load"]["queued"] == 3)

    await system.until(are_told)
    streams[3].cancel()
    await asyncio.wait({streams[3]})

    system.shared.gate.set()

    ids = [await streams[number] for number in (0, 1, 2, 4)]
    assert ids == [expected_ids([number, 8, 9], TOKENS) for number in (0, 1, 2, 4)]
    assert len(system.shared.rooms) == 4


async def test_a_chat_goes_by_the_ids_of_its_messages(sglangs: Builder) -> None:
    """SGLang's own chats have no ids before their end: none could be continued."""
    system = await sglangs()
    decode = vocabulary().tokenizer.decode

    events = await system.events(messages=[{"role": "user", "content": "hi"}])
    system.shared.prompt_tokens = len(ids_of("user: hello\n"))
    for position in range(TOKENS):
        system.shared.faults = {position: Fault.RESET}
        assert await system.text("hello") == decode(chat_ids("hello")), position
        assert not system.shared.faults

    first = events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == decode(chat_ids("hi"))


async def test_a_chat_has_the_sampling_of_its_model(sglangs: Builder) -> None:
    """SGLang's own chats have it, and its completions have not."""
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 9}
    system = await sglangs(generation=defaults)
    messages = [{"role": "user", "content": "hi"}]

    await system.events(messages=messages, temperature=None, top_k=5)
    await system.ids(temperature=None)

    chat, completion = (room.bodies["decode"] for room in system.shared.rooms.values())
    names = ("temperature", "top_k", "repetition_penalty")
    assert [chat[name] for name in names] == [0.6, 5, 1.05]
    assert not any(name in completion for name in names)


@pytest.mark.parametrize("field", [{"no_stop_trim": True}, {"skip_special_tokens": False}])
async def test_a_chat_whose_text_is_not_that_of_its_ids_is_the_engines(
    sglangs: Builder, field: dict[str, bool]
) -> None:
    system = await sglangs()

    await system.text("hi", **field)

    (room,) = system.shared.rooms.values()
    assert "messages" in room.bodies["decode"]


async def test_a_server_that_makes_no_ids_of_messages_has_chats(sglangs: Builder) -> None:
    """An older one: they are served, and not continued."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.lacks.add("/tokenize")

    system = await sglangs(prepare)

    assert await system.text("hi") == vocabulary().tokenizer.decode(chat_ids("hi"))


async def test_a_chat_with_tools_is_the_engines_and_has_no_ids(sglangs: Builder) -> None:
    """The engine parses its output; the response says that nothing continues it."""
    system = await sglangs()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "stream": True,
        "max_tokens": TOKENS,
    }

    async with system.http.post(system.url + "/v1/chat/completions", json=fields) as response:
        body = await response.read()

    assert response.headers["X-Kvrs-Exact"] == "no"
    assert body.endswith(b"data: [DONE]\n\n")
    (room,) = system.shared.rooms.values()
    assert "tools" in room.bodies["decode"]
    assert "return_token_ids" not in room.bodies["decode"]


async def test_an_id_out_of_the_vocabulary_reaches_no_server(sglangs: Builder) -> None:
    """SGLang 0.5.23 does not check it, and its scheduler ends."""
    system = await sglangs()

    status, body = await system.ask({"prompt": [5, 1 << 30], "max_tokens": 3, "stream": True})

    assert status == 400
    assert "token id 1073741824" in body.decode()
    assert system.shared.rooms == {}


async def test_the_key_of_the_environment_is_sglangs(
    sglangs: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRS_SGLANG_API_KEY", "of sglang")
    system = await sglangs()

    await system.ids()

    for server in system.servers.values():
        assert {each.get("Authorization") for each in server.headers} == {"Bearer of sglang"}


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty"])
async def test_penalties_are_marked(sglangs: Builder, name: str) -> None:
    """All of them count the output of one request only."""
    system = await sglangs()
    fields = {"prompt": PROMPT, "stream": True, "max_tokens": 3, "temperature": 0, name: 1.5}

    async with system.http.post(system.url + "/v1/completions", json=fields) as response:
        await response.read()

    assert response.headers["X-Kvrs-Inexact"] == name


@pytest.mark.parametrize("moves", [True, False, None])
async def test_kv_that_moves_is_seen_by_the_counters_of_prefill(
    sglangs: Builder, moves: bool | None
) -> None:
    """By a self-test. Without --enable-metrics there are none: what is not counted is believed."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.sent_mb, server.hides_kv = 3.0, moves is False
            if moves is not None:
                server.lacks.clear()

    system = await sglangs(prepare, proxy={"self_test": True})

    async def are_tested() -> bool:
        rows = (await system.state())["instances"]
        return all(row["self_test"] and row["self_test"]["done"] for row in rows)

    await system.until(are_tested)
    tests = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
    assert {test["moves_kv"] for test in tests.values()} == {moves is not False}
    asked = [call for server in system.servers.values() for call in server.calls]
    assert "GET /metrics" in asked or moves is None


def replaying(servers: Servers) -> None:
    for server in servers.values():
        server.replays = True


async def test_a_stream_with_penalties_begins_again_and_is_exact(sglangs: Builder) -> None:
    """With its output so far, which both servers of the pair generate once more."""
    system = await sglangs(replaying)
    for position in range(1, TOKENS):
        system.shared.faults = {position: Fault.RESET}
        fields = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        fields |= {"return_token_ids": True, "presence_penalty": 1.5}

        async with system.http.post(system.url + "/v1/completions", json=fields) as response:
            *events, _, _ = events_of(await response.read())
            assert "X-Kvrs-Exact" not in response.headers

        choices = [json.loads(each[6:])["choices"][0] for each in events]
        ids = [i for choice in choices for i in choice["token_ids"]]
        assert ids == expected_ids(PROMPT, TOKENS)
        replayed = [each for server in system.servers.values() for each in server.replayed]
        assert replayed == [expected_ids(PROMPT, position)] * 2
        for server in system.servers.values():
            server.replayed.clear()
    assert {row["option"] for row in (await system.state())["recoveries"]} == {"replay"}
    assert system.shared.violations == []


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.7, "seed": 5}, {"messages": [{"role": "user", "content": "hi"}]}]
)
async def test_what_no_replay_makes_exact_is_marked(
    sglangs: Builder, fields: dict[str, object]
) -> None:
    """Sampling, as SGLang's random numbers are those of all its requests; and chats."""
    system = await sglangs(replaying)
    path = "chat/completions" if "messages" in fields else "completions"
    asked: dict[str, object] = {"prompt": PROMPT} if path == "completions" else {}
    asked |= {"stream": True, "max_tokens": 3, "presence_penalty": 1.5, "temperature": 0} | fields

    async with system.http.post(f"{system.url}/v1/{path}", json=asked) as response:
        await response.read()

    assert response.headers["X-Kvrs-Exact"] == "no"


async def test_nothing_is_promised_that_prefill_cannot_generate_again(sglangs: Builder) -> None:
    """Its token is the first one."""

    def prepare(servers: Servers) -> None:
        for name in ("d0", "d1", "p0"):
            servers[name].replays = True

    system = await sglangs(prepare)
    fields = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "presence_penalty": 1.5}
    async with system.http.post(system.url + "/v1/completions", json=fields) as response:
        await response.read()

    assert response.headers["X-Kvrs-Inexact"] == "presence_penalty"


async def test_a_server_of_another_mode_is_not_used(sglangs: Builder) -> None:
    """It would refuse, or hang at, what its role is sent; the reason names both."""

    def prepare(servers: Servers) -> None:
        servers["d1"].mode = "null"

    system = await sglangs(prepare, wait=False)
    await system.until_health(p0="up", p1="up", d0="up")

    async def is_told() -> bool:
        rows = {row["id"]: row for row in (await system.state())["instances"]}
        return "--disaggregation-mode 'null'" in (rows["d1"]["reason"] or "")

    await system.until(is_told)
    assert await system.ids() == expected_ids(PROMPT, TOKENS)


async def test_a_pair_that_cannot_agree_is_not_made(sglangs: Builder) -> None:
    """KV of another transfer backend never comes: decode would hang."""

    def prepare(servers: Servers) -> None:
        servers["d1"].transfer_backend = servers["p1"].transfer_backend = "nixl"

    system = await sglangs(prepare)

    ids = await asyncio.gather(*(system.ids([number, 8, 9]) for number in range(6)))

    assert ids == [expected_ids([number, 8, 9], TOKENS) for number in range(6)]
    for room in system.shared.rooms.values():
        assert len(room.bodies) == 2
    by_server = {name: len(server.bodies) for name, server in system.servers.items()}
    assert by_server["p0"] == by_server["d0"]
    assert by_server["p1"] == by_server["d1"]


async def test_a_server_that_is_leaving_gets_nothing_new(sglangs: Builder) -> None:
    """SIGTERM: it goes on with its streams and takes new ones, which it should not get."""
    system = await sglangs()
    system.servers["d0"].is_leaving = True

    async def is_drained() -> bool:
        rows = {row["id"]: row for row in (await system.state())["instances"]}
        return bool(rows["d0"]["load"]["draining"])

    await system.until(is_drained)
    before = len(system.servers["d0"].bodies)
    await asyncio.gather(*(system.ids([number, 8, 9]) for number in range(4)))
    assert len(system.servers["d0"].bodies) == before


async def test_a_server_whose_load_fails_keeps_its_streams(sglangs: Builder) -> None:
    """Tokens that arrive are life; without them the server is dead until its load is read again."""
    system = await sglangs()
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    system.shared.pause_s = 0.1
    stream = asyncio.create_task(system.ids(max_tokens=60))
    await system.until_streams_hold(2)
    at = next(row["decode"] for row in (await system.state())["streams"])
    system.shared.gate.set()
    await asyncio.sleep(0.5)

    system.servers[at].fails_loads = True

    assert await stream == expected_ids(PROMPT, 60)
    assert (await system.state())["recoveries"] == []
    await system.until_health(**{at: "down"})
    system.servers[at].fails_loads = False
    await system.until_health(**{at: "up"})


async def test_a_server_that_computes_prompts_itself_needs_no_pair(sglangs: Builder) -> None:
    """Without `--disaggregation-mode`, and no prefill server."""

    def prepare(servers: Servers) -> None:
        for name in ("p0", "p1"):
            del servers[name]
        for server in servers.values():
            server.mode = "null"

    system = await sglangs(prepare)
    system.shared.faults = {3: Fault.RESET}

    assert await system.ids() == expected_ids(PROMPT, TOKENS)
    assert system.shared.rooms == {}


async def test_self_tests_are_pairs_too(sglangs: Builder) -> None:
    system = await sglangs(proxy={"self_test": True})

    async def are_done() -> bool:
        rows = (await system.state())["instances"]
        return all(row["self_test"]["done"] for row in rows)

    await system.until(are_done)
    rows = {row["id"]: row["self_test"] for row in (await system.state())["instances"]}
    assert rows["d0"]["continues"] == "exact seeded"
    assert system.shared.violations == []


async def test_another_process_is_another_epoch(sglangs: Builder) -> None:
    """By the times of its start, since nothing else of it differs."""
    system = await sglangs()

    async def epoch() -> int:
        return int({row["id"]: row for row in (await system.state())["instances"]}["d0"]["epoch"])

    before = await epoch()
    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    await system.servers["d0"].start()
    await system.until_health(d0="up")

    assert await epoch() > before


async def _is_true(holds: bool) -> bool:
    return holds


async def test_the_guess_of_a_server_is_that_of_its_gpus(sglangs: Builder) -> None:
    """Their name and number are in its `/v1/loads`; another name changes nothing."""

    def prepare(servers: Servers) -> None:
        servers["p0"].accelerator = "NVIDIA H100 80GB HBM3"
        servers["p1"].accelerator = "a GPU of tomorrow"

    system = await sglangs(prepare, profiles={"prefill": None})

    known = system.proxy.parts.driver.control.instances.known
    labels = {name: each.info.prefill.label for name, each in known.items()}
    assert labels == {
        "p0": "guess, NVIDIA H100 80GB HBM3",
        "p1": "guess",
        "d0": "guess",
        "d1": "guess",
    }
    computed_s = {str(name): each.info.prefill.seconds[-1] - STEP_S for name, each in known.items()}
    assert 3 < computed_s["p1"] / computed_s["p0"] < 3.3
