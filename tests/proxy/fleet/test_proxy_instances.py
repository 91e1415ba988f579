"""How the proxy meets instances, loses them, and takes them back."""

import asyncio
import re

import msgspec

import kvrs
from kvrs.ids import StreamId
from kvrs.protocol.instance import Capability, SourceRange
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault, Scripted
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.conftest import ProxyClusterBuilder

PROMPT = list(range(40))  # Two full pages and a part of a third.
TOKENS = 8
REQUEST = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}


def text(count: int = TOKENS) -> str:
    return "".join(map(text_of, expected_ids(PROMPT, count)))


async def answer_text(system: ProxyCluster, **fields: object) -> str:
    status, body = await system.complete(**(REQUEST | fields))
    assert status == 200, body
    answer: str = msgspec.json.decode(body)["choices"][0]["text"]
    return answer


async def test_an_instance_that_lived_on_is_fenced_before_it_is_used_again(
    build: ProxyClusterBuilder,
) -> None:
    """Cut off is not dead: its former attempts are dropped by name, and its epoch rises."""
    system = await build()
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(answer_text(system)) for _ in range(2)]
    await system.until_streams_hold(3, count=2)
    victims = {
        s["id"]: s["attempt"] for s in (await system.state())["streams"] if s["decode"] == "d0"
    }

    system.instances["d0"].cut_watch()
    await system.until(lambda: _is(system, "d0", epoch=2, starts=1))
    system.script.gate.set()

    assert await asyncio.gather(*asked) == [text()] * 2
    assert victims
    assert system.instances["d0"].fences == [
        {stream: attempt + 1 for stream, attempt in victims.items()}
    ]
    assert (await system.health())["d0"] == "up"


async def test_nothing_is_written_while_a_stream_waits_for_an_instance(
    build: ProxyClusterBuilder,
) -> None:
    """The attempt on a lost instance is over at once, also when there is nowhere to go."""
    system = await build(pairs=1)
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(answer_text(system))
    await system.until_streams_hold(3)

    system.instances["d0"].deaf = True
    system.instances["d0"].cut_watch()
    await system.until(lambda: _truth(system.instances["d0"].aborted == 1))
    system.instances["d0"].deaf = False
    system.script.gate.set()

    assert await asked == text()
    assert [r.kvrs.attempt for r in system.instances["d0"].completions if r.kvrs] == [1, 2]


async def test_an_instance_with_other_weights_is_refused(build: ProxyClusterBuilder) -> None:
    """A stream cannot continue on another model; the mismatch is named and nothing is sent
    there.
    """

    system = await build(pairs=2)
    await system.instances["d1"].kill()
    system.instances["d1"].fingerprint = "other"

    await system.instances["d1"].restart()
    await system.until_health(d1="refused")

    texts = [await answer_text(system) for _ in range(4)]

    assert texts == [text()] * 4
    assert system.instances["d1"].completions == []
    (shown,) = [i for i in (await system.state())["instances"] if i["id"] == "d1"]
    assert "fingerprint is 'other'" in shown["reason"]


async def test_of_two_models_only_one_is_served(build: ProxyClusterBuilder) -> None:
    """Whichever answers first is the measure, also when all answer at once."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d1"].fingerprint = instances["p1"].fingerprint = "other"

    system = await build(pairs=2, wait=False, prepare=prepare)

    await system.until(lambda: _served(system, 2))
    assert {
        i["load"] is not None
        for i in (await system.state())["instances"]
        if i["health"] == "refused"
    } == {False}


async def test_an_instance_of_another_name_than_the_served_one_is_refused(
    build: ProxyClusterBuilder,
) -> None:
    """Its requests would be answered under a name that clients did not ask for."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d1"].model = "other"

    system = await build(pairs=2, wait=False, prepare=prepare, cluster={"served_name": "scripted"})

    await system.until_health(d1="refused", d0="up")
    (shown,) = [i for i in (await system.state())["instances"] if i["id"] == "d1"]
    assert shown["reason"] == "model is 'other', cluster.served_name says 'scripted'"


async def test_an_instance_that_is_not_the_configured_one_is_refused(
    build: ProxyClusterBuilder,
) -> None:
    """Ports get mixed up."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d1"].id = "someone"

    system = await build(wait=False, prepare=prepare)

    await system.until_health(d1="refused", d0="up")


async def test_a_capability_of_a_later_version_is_an_offer_that_is_not_taken(
    build: ProxyClusterBuilder,
) -> None:
    """The instance serves as one without it. So engines may be updated before proxies, and engines
    that still declare what proxies have given up need no update.
    """

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            instance.capabilities = [*Capability, Capability("of_a_later_version")]

    system = await build(pairs=1, prepare=prepare)

    assert [await answer_text(system) for _ in range(2)] == [text()] * 2


async def test_an_instance_that_is_not_reached_says_why(build: ProxyClusterBuilder) -> None:
    """An operator with a wrong port or secret finds the reason in the state, not a bare `down`."""
    system = await build(pairs=1)
    await system.instances["d0"].kill()

    async def explains() -> bool:
        row = next(row for row in (await system.state())["instances"] if row["id"] == "d0")
        return (
            row["health"] == "down"
            and "connect" in row.get("reason", "")
            and str(system.instances["d0"].port) in row["reason"]
        )

    await system.until(explains)


async def test_without_any_instance_the_answer_is_503_with_retry_after(
    build: ProxyClusterBuilder,
) -> None:
    """After `policy.recovery.wait_s`; a status, for nothing was sent yet."""
    system = await build(pairs=1, policy={"recovery": {"wait_s": 0.1}})
    await system.instances["d0"].kill()
    await system.until_health(d0="down")

    async with system.http.post(
        f"{system.url}/v1/completions", json=REQUEST | {"stream": True}
    ) as response:
        body = await response.read()

    assert response.status == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert msgspec.json.decode(body)["error"]["code"] == "no_instance"


async def test_a_poisoned_request_is_given_up_after_max_attempts(
    build: ProxyClusterBuilder,
) -> None:
    """One request must not go on breaking instances."""
    system = await build(policy={"recovery": {"max_attempts": 3}})
    system.script.prefill_faults = [Fault.RESET] * 10

    status, body = await system.complete(**REQUEST)

    assert status == 502
    assert msgspec.json.decode(body)["error"]["code"] == "retries"
    assert len(system.script.prefill_faults) == 7


async def test_a_stream_costs_two_calls_and_an_instance_two_watches(
    build: ProxyClusterBuilder,
) -> None:
    """The healthy path sends what plain P/D sends, and no more."""
    system = await build(pairs=1, transfer={"lease_s": 3600.0})

    for _ in range(5):
        await answer_text(system)

    for name in ("p0", "d0"):
        calls = system.instances[name].calls
        assert calls.count("POST /v1/completions") == 5
        assert len(calls) == 8, "and one for its info, one each for load and heartbeats"
        assert system.instances[name].watches == 1


async def test_hand_off_parameters_reach_decode_unchanged(build: ProxyClusterBuilder) -> None:
    """Fields that the proxy does not know are forwarded too, and ids name the writer of each."""
    system = await build(pairs=1)

    await answer_text(system)

    (prefill,), (decode,) = system.instances["p0"].completions, system.instances["d0"].completions
    assert prefill.max_tokens == 1
    assert decode.kv_transfer_params is not None
    assert decode.kv_transfer_params.remote_engine_id == "p0"
    assert decode.kvrs is not None
    assert prefill.kvrs is not None
    assert (decode.kvrs.stream, decode.kvrs.attempt, decode.kvrs.prompt_tokens) == (
        prefill.kvrs.stream,
        1,
        len(PROMPT),
    )


async def test_a_migration_names_who_holds_the_prompt(build: ProxyClusterBuilder) -> None:
    """The retained pages are pulled from prefill; nothing is prefilled again."""
    system = await build(policy={"name": "always_migrate"})
    system.script.faults = {3: Fault.RESET}

    assert await answer_text(system) == text()

    (recovery,) = (await system.state())["recoveries"]
    assert recovery["option"] == "migrate"
    prefills = [name for name in ("p0", "p1") if system.instances[name].completions]
    assert len(prefills) == 1
    decode = system.instances[recovery["to"]].completions[-1]
    assert decode.kvrs is not None
    assert [(s.id, s.first_page, s.pages, s.generation) for s in decode.kvrs.sources] == [
        (prefills[0], 0, 2, 1)
    ]
    assert isinstance(decode.kvrs.sources[0], SourceRange)


async def test_leases_are_renewed_and_released_in_batches(build: ProxyClusterBuilder) -> None:
    """One message per instance and third of a lease covers all its streams."""
    system = await build(pairs=1, transfer={"lease_s": 0.3})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(answer_text(system)) for _ in range(5)]
    await system.until_streams_hold(3, count=5)
    streams = sorted(s["id"] for s in (await system.state())["streams"])
    p0 = system.instances["p0"]

    await system.until(lambda: _truth(any(sorted(u.renew) == streams for u in p0.lease_updates)))
    system.script.gate.set()
    await asyncio.gather(*asked)
    # Where a renewal falls between the ends of two streams, the releases come in two batches.
    await system.until(lambda: _truth(len(released_at(p0)) >= len(streams)))

    assert sorted(released_at(p0)) == streams
    assert system.instances["d0"].lease_updates == []


def released_at(instance: Scripted) -> list[StreamId]:
    return [stream for update in instance.lease_updates for stream in update.release]


async def test_a_lost_lease_is_no_source_any_more(build: ProxyClusterBuilder) -> None:
    """Pages that an instance no longer retains are computed again."""
    system = await build(pairs=2, transfer={"lease_s": 0.15}, policy={"name": "always_migrate"})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(answer_text(system))
    await system.until_streams_hold(3)
    (stream,) = (await system.state())["streams"]
    holder = system.instances[stream["prefill"]]
    holder.forgotten.add(stream["id"])
    seen = len(holder.lease_updates)
    await system.until(
        lambda: _truth(any(stream["id"] in u.renew for u in holder.lease_updates[seen:]))
    )
    await system.instances[stream["decode"]].kill()
    system.script.gate.set()

    assert await asked == text()
    (recovery,) = (await system.state())["recoveries"]
    assert recovery["option"] == "recompute"


async def test_metrics_count_what_happened(build: ProxyClusterBuilder) -> None:
    """Requests, tokens, recoveries by option and outcome, and which instance is up."""
    system = await build(policy={"name": "always_recompute"})
    system.script.faults = {3: Fault.RESET}
    await answer_text(system)

    metrics = await system.metrics()

    assert 'kvrs_requests_total{outcome="complete"} 1.0' in metrics
    assert f"kvrs_tokens_relayed_total {TOKENS}.0" in metrics
    assert 'kvrs_recoveries_total{option="recompute",outcome="resumed"} 1.0' in metrics
    assert 'kvrs_worker_up{worker="d1"} 1.0' in metrics
    assert re.search(r"kvrs_ttft_seconds_count 1\.0", metrics)
    assert "kvrs_streams_active 0.0" in metrics


async def _is(system: ProxyCluster, name: str, **wanted: object) -> bool:
    (shown,) = [i for i in (await system.state())["instances"] if i["id"] == name]
    return all(shown[key] == value for key, value in wanted.items())


async def _served(system: ProxyCluster, refused: int) -> bool:
    return list((await system.health()).values()).count("refused") == refused


async def _truth(value: bool) -> bool:
    return value


async def test_the_state_names_version_policy_and_configuration(build: ProxyClusterBuilder) -> None:
    """A report of a run names them, so that its numbers can be compared with others."""
    system = await build(policy={"name": "rom"})

    row = (await system.state())["proxies"][0]

    assert (row["version"], row["policy"]) == (kvrs.__version__, "rom")
    assert re.fullmatch("[0-9a-f]{16}", row["config_digest"])
