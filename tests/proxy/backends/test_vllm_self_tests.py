"""Findings of a self-test about a vLLM, and what follows from them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvrs.net.http import answer
from kvrs.net.routes import Request, Response
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Arithmetic, Sampler
from kvrs_testkit.scripted_vllm import ScriptedVllm
from kvrs_testkit.sse import events_of
from kvrs_testkit.vllm_cluster import LONG, PROMPT, Builder, Servers, Vllms

SAMPLED = {"temperature": 0.8, "max_tokens": 6}


def arithmetics(**by_name: Arithmetic) -> Any:
    def prepare(servers: Servers) -> None:
        for name, arithmetic in by_name.items():
            servers[name].arithmetic = arithmetic

    return prepare


async def tested(vllms: Builder, **settings: Any) -> Vllms:
    """A cluster whose self-tests have ended."""
    proxy = {"self_test": True} | settings.pop("proxy", {})
    system = await vllms(proxy=proxy, **settings)
    await until_tested(system)
    for server in system.servers.values():
        server.bodies.clear()
    return system


async def until_tested(system: Vllms) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def holds() -> bool:
        found.update({row["id"]: row["self_test"] for row in (await system.state())["instances"]})
        return all(row is not None and row["done"] for row in found.values())

    await system.until(holds)
    return found


def decode_bodies(system: Vllms) -> list[dict[str, Any]]:
    return [body for name in ("d0", "d1") for body in system.servers[name].bodies]


KEYED, GENERATOR = Arithmetic(), Arithmetic(sampler=Sampler.GENERATOR)


async def test_a_sampler_that_is_keyed_by_position_makes_sampled_streams_exact(
    vllms: Builder,
) -> None:
    """A request without a seed gets one, the same in every attempt, and continues exactly."""
    system = await tested(
        vllms, prepare=arithmetics(d0=KEYED, d1=KEYED), proxy={"inexact": "refuse"}
    )
    found = await until_tested(system)
    system.shared.faults[3] = Fault.RESET

    ids = await system.ids(PROMPT, **SAMPLED)
    first, second = decode_bodies(system)
    alone = await system.ids(PROMPT, **SAMPLED, seed=first["seed"])

    assert {found[name]["continues"] for name in ("d0", "d1")} == {"exact seeded"}
    assert first["seed"] == second["seed"]
    assert ids == alone


async def test_the_seeds_of_two_requests_differ(vllms: Builder) -> None:
    """Unseeded randomness stays random; a client's own seed is left as it is."""
    system = await tested(vllms, prepare=arithmetics(d0=KEYED, d1=KEYED))

    for _ in range(2):
        await system.ids(PROMPT, **SAMPLED)
    await system.ids(PROMPT, **SAMPLED, seed=7)
    seeds = [body["seed"] for body in decode_bodies(system)]

    assert len(set(seeds)) == 3
    assert 7 in seeds


async def test_a_sampler_whose_state_is_lost_gets_no_seed(vllms: Builder) -> None:
    """With one it would draw the numbers of the first tokens again; the stream is marked."""
    system = await tested(vllms, prepare=arithmetics(d0=GENERATOR, d1=GENERATOR))
    found = await until_tested(system)

    request = {"prompt": PROMPT, **SAMPLED}
    async with system.http.post(system.url + "/v1/completions", json=request) as response:
        mark = response.headers.get("X-Kvrs-Exact")
        reasons = response.headers.get("X-Kvrs-Inexact")
        await response.read()
    greedy = await system.ask({"prompt": PROMPT, "temperature": 0, "max_tokens": 3})

    assert {found[name]["continues"] for name in ("d0", "d1")} == {"exact greedy"}
    assert (mark, reasons) == ("no", "temperature")
    assert greedy[0] == 200
    assert all("seed" not in body for body in decode_bodies(system))


async def test_one_instance_that_loses_the_state_makes_sampled_streams_inexact(
    vllms: Builder,
) -> None:
    """A stream may have to go there."""
    system = await tested(
        vllms, prepare=arithmetics(d0=KEYED, d1=GENERATOR), proxy={"inexact": "refuse"}
    )

    sampled = await system.ask({"prompt": PROMPT, **SAMPLED})
    greedy = await system.ask({"prompt": PROMPT, "temperature": 0})

    assert sampled[0] == 400
    assert msgspec.json.decode(sampled[1])["error"]["param"] == "temperature"
    assert greedy[0] == 200


# Fault 65: hand-offs that move nothing.


async def test_kv_that_silently_does_not_move_is_not_counted_on(vllms: Builder) -> None:
    """Decode then computes the history behind prefill, so that to migrate would be to compute it
    twice.
    """

    def prepare(servers: Servers) -> None:
        servers["d1"].moves_kv = False

    system = await tested(vllms, prepare=prepare)
    found = await until_tested(system)
    system.shared.prompt_tokens = len(LONG)
    system.shared.faults[3] = Fault.RESET

    await system.ids(LONG)
    (recovery,) = (await system.state())["recoveries"]

    assert {name: row["moves_kv"] for name, row in found.items()} == {
        "p0": True,
        "d0": True,
        "d1": False,
    }
    assert found["d1"]["cause"] == "no KV moved from p0 to d1"
    assert "prefix_cache" not in found["d1"]["capabilities"]
    assert (recovery["option"], recovery["to"]) == ("recompute", "d1")
    (body,) = system.servers["d1"].bodies
    assert "kv_transfer_params" not in body
    assert {estimate["option"] for estimate in recovery["estimates"]} == {"recompute"}


# Fault 70: survivors that compute otherwise.


async def test_an_instance_that_computes_other_tokens_is_named(vllms: Builder) -> None:
    """Other weights, or a fault: a stream goes on where it began."""
    system = await tested(vllms, prepare=arithmetics(d0=KEYED, d1=Arithmetic(1)))
    found = await until_tested(system)
    system.shared.faults[3] = Fault.RESET

    request = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    status, body = await system.ask(request)

    assert [found[name]["continues"] for name in ("d0", "d1")] == ["exact seeded"] * 2
    assert [found[name]["differs_from"] for name in ("d0", "d1")] == [["d1"], ["d0", "p0"]]
    (row,) = (await system.state())["recoveries"]
    assert row["to"] == row["from"]
    assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)


@pytest.mark.parametrize(("gap", "is_tie"), [(0.4, True), (0.6, False)])
async def test_a_near_tie_is_no_difference_of_weights(
    vllms: Builder, gap: float, *, is_tie: bool
) -> None:
    """Two tokens that are about as likely at either server change places by rounding. Streams may
    go on at both, and say so in their heads.
    """

    def prepare(servers: Servers) -> None:
        arithmetics(d0=KEYED, d1=Arithmetic(1))(servers)
        for name in ("p0", "d0", "d1"):
            servers[name].tie_gap = gap

    system = await tested(vllms, prepare=prepare)
    found = await until_tested(system)

    request = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
    async with system.http.post(system.url + "/v1/completions", json=request) as response:
        mark = response.headers.get("X-Kvrs-Exact")

    others = {"d0": ["d1"], "d1": ["d0", "p0"]}
    assert {name: found[name]["near_ties_with"] for name in others} == (
        others if is_tie else {"d0": [], "d1": []}
    )
    assert {name: found[name]["differs_from"] for name in others} == (
        {"d0": [], "d1": []} if is_tie else others
    )
    assert mark == ("no" if is_tie else None)


async def test_a_stream_that_must_be_exact_ends_where_only_others_are_left(
    vllms: Builder,
) -> None:
    """Rather an error than another continuation: its head has promised that."""
    system = await tested(
        vllms,
        prepare=arithmetics(d0=KEYED, d1=Arithmetic(1)),
        policy={"recovery": {"wait_s": 0.5}},
    )
    system.shared.pause_s = 0.02
    request = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    asking = asyncio.create_task(system.ask(request))
    await system.until_streams_hold(2)
    decoding = next(each for each in system.servers.values() if each.running)
    await decoding.kill()
    _, body = await asking

    (error,) = (event[6:] for event in events_of(body) if b'"error"' in event)
    assert msgspec.json.decode(error)["error"]["code"] == "inexact"


@pytest.mark.parametrize("other", [KEYED, Arithmetic(1)])
async def test_a_stream_that_is_resumed_is_marked_where_instances_differ(
    vllms: Builder, other: Arithmetic
) -> None:
    """By which of them its output began is not known at its next owner."""
    system = await tested(vllms, prepare=arithmetics(d0=KEYED, d1=other))
    await until_tested(system)
    system.shared.pause_s = 0.05
    request = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True}
    url, headers = f"{system.url}/v1/completions", {"Idempotency-Key": "k"}
    async with system.http.post(url, json=request, headers=headers) as first:
        await first.content.readuntil(b"\n\n")
        first.close()
    await asyncio.sleep(0.2)  # Until the proxy has noticed it.

    async with system.http.post(url, json=request, headers=headers) as second:
        body = await second.read()

    assert body.endswith(b"data: [DONE]\n\n")
    assert second.headers.get("X-Kvrs-Exact") == (None if other == KEYED else "no")


async def test_an_instance_without_any_order_is_not_called_exact(vllms: Builder) -> None:
    """Then nothing is promised for any stream."""
    noise = Arithmetic(sampler=Sampler.NOISE)
    system = await tested(vllms, prepare=arithmetics(d0=noise, d1=noise))
    found = await until_tested(system)

    request = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    async with system.http.post(system.url + "/v1/completions", json=request) as response:
        mark = response.headers.get("X-Kvrs-Exact")

    assert {found[name]["continues"] for name in ("d0", "d1")} == {"text-stitched"}
    assert mark == "no"


# Fault 64: healthy by /health.


@pytest.mark.parametrize("path", ["/fault_tolerance/status", "/v1/fault_tolerance/status"])
@pytest.mark.parametrize("status", ["unhealthy", "paused", "dead"])
async def test_an_engine_that_has_stopped_is_lost_though_health_says_200(
    vllms: Builder, path: str, status: str
) -> None:
    """Its streams go on elsewhere, and it is used again when it is well."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.engines, server.ft_path = ["healthy", "healthy"], path

    system = await vllms(prepare=prepare)
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3
    asking = asyncio.create_task(system.ids(PROMPT))
    await system.until_streams_hold(3)
    (stream,) = (await system.state())["streams"]
    here = system.servers[stream["decode"]]

    here.engines = ["healthy", status]
    await system.until_health(**{stream["decode"]: "down"})
    system.shared.gate.set()
    ids = await asking
    while_down = (await system.state())["instances"]
    here.engines = ["healthy", "healthy"]
    await system.until_health(**{stream["decode"]: "up"})

    assert len(ids) == 6
    reason = next(row["reason"] for row in while_down if row["id"] == stream["decode"])
    assert f"1 of its 2 engines: {status}" in reason


# Fault 66: a hand-off is gone once decode has answered.


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.ERROR, Fault.EMPTY])
async def test_a_hand_off_is_never_used_again_after_decode_has_answered(
    vllms: Builder, fault: Fault
) -> None:
    """Prefill frees its blocks when decode has pulled them, before the first byte: the next attempt
    has a hand-off of its own, or none.
    """
    system = await vllms()
    system.shared.prompt_tokens = len(LONG)
    system.shared.faults[0] = fault

    ids = await system.ids(LONG)
    used = [
        body["kv_transfer_params"]["remote_request_id"]
        for body in decode_bodies(system)
        if "kv_transfer_params" in body
    ]

    assert len(ids) == 6
    assert system.shared.violations == []
    assert len(used) == len(set(used))


# Fault 69: kernels that nothing has warmed up.


async def test_no_stream_is_the_first_seeded_request(vllms: Builder) -> None:
    """The proxy's own request compiles the kernels, before the instance is up."""

    def prepare(servers: Servers) -> None:
        for name in ("d0", "d1"):
            servers[name].cold = True

    system = await vllms(prepare=prepare)

    await system.ids(PROMPT, **SAMPLED, seed=3)

    waited = [body for name in ("d0", "d1") for body in system.servers[name].waited]
    assert [body["prompt"] for body in waited] == [[1], [1]]


@dataclass(eq=False)
class Particular(ScriptedVllm):
    """A server that gives no log probabilities."""

    taken: set[str] = field(default_factory=set)  # Fields of requests that it does not refuse.

    async def _completions(self, request: Request) -> Response:
        fields = msgspec.json.decode(await request.read())
        if "logprobs" in fields:
            return answer({"error": {"message": "no", "code": 400}}, 400)
        self.taken.update(fields)
        return await super()._completions(request)


async def test_a_refused_feature_keeps_no_other_one_cold(vllms: Builder) -> None:
    """Each is asked for by a request of its own."""
    taken = set[str]()

    def prepare(servers: Servers) -> None:
        for name in ("d0", "d1"):
            one = servers[name]
            servers[name] = Particular(
                name, one.node, role=one.role, script=one.script, taken=taken
            )

    system = await tested(vllms, prepare=prepare)

    rows = (await system.state())["instances"]
    assert [row["self_test"]["failures"] for row in rows] == [0] * len(rows)
    assert taken > {"presence_penalty", "structured_outputs"}
