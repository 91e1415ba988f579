"""Pairs of calls at SGLang that are given up while KV may be moving between their servers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.security import key_hash
from kvrs.core.model.member import TRANSFER_S
from kvrs.proxy.backends.bodies import Detached
from kvrs.proxy.streams import abandoned
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_sglang import Room
from kvrs_testkit.sglang_cluster import PROMPT, TOKENS, Servers, Sglangs

Builder = Callable[..., Awaitable[Sglangs]]
LONG_S = 600.0


def one_decode(servers: Servers) -> None:
    del servers["d1"]


async def is_true(holds: bool) -> bool:
    return holds


async def begun(system: Sglangs, **fields: Any) -> tuple[asyncio.Task[list[int]], Room]:
    """A stream whose two calls have met, and their room."""
    before = len(system.shared.rooms)
    stream = asyncio.create_task(system.ids(**fields))

    async def have_met() -> bool:
        rooms = [*system.shared.rooms.values()][before:]
        return any(len(room.bodies) == 2 for room in rooms)

    await system.until(have_met)
    return stream, [*system.shared.rooms.values()][before]


async def hanging(system: Sglangs) -> tuple[asyncio.Task[list[int]], Room, str]:
    """A stream whose transfer hangs, alone among all, its room, and its decode server."""
    system.shared.transfer_s = LONG_S
    stream, room = await begun(system)
    system.shared.transfer_s = 0.0
    decode = next(name for name, s in system.servers.items() if s.role == "decode" and s.bodies)
    return stream, room, decode


async def leave(stream: asyncio.Task[Any]) -> None:
    stream.cancel()
    await asyncio.wait({stream})


async def ends(system: Sglangs) -> dict[str, float]:
    """Detached pairs by what ended them; those that did not happen are left out."""
    counts = {
        each.value: await system.count("kvrs_detached_pairs_total", outcome=each.value)
        for each in Detached
    }
    return {outcome: count for outcome, count in counts.items() if count}


async def kept(system: Sglangs) -> int:
    return sum(row["detached_pairs"] for row in (await system.state())["instances"])


async def until_none_is_kept(system: Sglangs) -> None:
    async def none() -> bool:
        return system.open_legs == 0 and not await kept(system)

    await system.until(none)


@pytest.mark.parametrize("where", ["compute", "transfer"])
async def test_a_pair_whose_client_leaves_stays_until_decodes_first_event(
    sglangs: Builder, where: str
) -> None:
    """SGLang gives the pages of a closed call to others, and prefill may still write there."""
    system = await sglangs()
    system.shared.compute_s, system.shared.transfer_s = (
        (5.0, 0.0) if where == "compute" else (0.0, 5.0)
    )
    system.shared.pause_s = 1.0
    stream, room = await begun(system)

    await leave(stream)
    await asyncio.sleep(4.0)
    assert (room.aborted, await kept(system)) == ({}, 1)
    assert await system.count("kvrs_worker_detached_pairs") == 1

    await until_none_is_kept(system)
    assert room.aborted == {"decode": True}
    assert await system.count("kvrs_worker_detached_pairs") == 0
    assert await ends(system) == {"began": 1}


async def test_a_pair_is_closed_at_once_after_decodes_first_event(sglangs: Builder) -> None:
    """All KV is there."""
    system = await sglangs()
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 2
    stream, room = await begun(system)
    await system.until_streams_hold(2)

    await leave(stream)

    await system.until(lambda: is_true(system.open_legs == 0))
    assert room.aborted == {"decode": True}
    assert await ends(system) == {}


async def test_a_silent_pair_stays_and_its_stream_goes_on_elsewhere_at_once(
    sglangs: Builder,
) -> None:
    """The stream has its end long before the pair that it has left."""
    system = await sglangs(proxy={"token_gap_s": 0.5})
    system.shared.transfer_s = 20.0
    stream, room = await begun(system)
    system.shared.transfer_s = 0.0

    assert await stream == expected_ids(PROMPT, TOKENS)
    assert (room.aborted, await kept(system)) == ({}, 1)

    await until_none_is_kept(system)
    assert room.aborted == {"decode": True}
    assert len(system.shared.rooms) == 2


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.ERROR, Fault.DONE_ONLY])
async def test_decode_is_left_alone_when_prefill_has_failed(sglangs: Builder, fault: Fault) -> None:
    """Other ranks of prefill may still write; decode has a time limit of its own, which is longer
    than TRANSFER_S here.
    """
    system = await sglangs()
    system.shared.compute_s, system.shared.prefill_fault = 0.1, fault
    stream, room = await begun(system)

    assert await stream == expected_ids(PROMPT, TOKENS)
    loop, ended_s = asyncio.get_running_loop(), room.ended_s["prefill"]
    await asyncio.sleep(TRANSFER_S - 1.0)
    assert (room.aborted, await kept(system)) == ({}, 1)

    await until_none_is_kept(system)
    assert room.aborted == {"decode": False}
    assert TRANSFER_S <= loop.time() - ended_s < TRANSFER_S + 2.0
    assert await ends(system) == {"hung": 1}


async def test_prefill_is_left_alone_when_decode_has_failed(sglangs: Builder) -> None:
    """It ends by itself, and with it the pair."""
    system = await sglangs()
    system.shared.transfer_s = 5.0
    stream, room = await begun(system)
    system.shared.transfer_s = 0.0

    room.legs["decode"].connection.abort()

    assert await stream == expected_ids(PROMPT, TOKENS)
    await until_none_is_kept(system)
    assert room.aborted == {"decode": False}
    assert await ends(system) == {"lost": 1}


async def test_a_refused_call_has_no_kv_in_flight(sglangs: Builder) -> None:
    """Prefill would wait for its decode until its own time limit."""
    system = await sglangs()
    system.servers["d0"].refuses_with = system.servers["d1"].refuses_with = 400

    status, _ = await system.ask({"prompt": PROMPT, "max_tokens": 3, "stream": True})

    assert status == 400
    await system.until(lambda: is_true(system.open_legs == 0))
    assert await ends(system) == {}


@pytest.mark.parametrize("how", ["drain", "deadline"])
async def test_a_pair_whose_stream_is_moved_or_ended_stays(sglangs: Builder, how: str) -> None:
    """A drain that moves streams; a request that got no token in time."""
    limit = {"request_timeout_s": 1.0} if how == "deadline" else {}
    system = await sglangs(proxy=limit)
    system.shared.transfer_s = 5.0
    stream, room = await begun(system)
    system.shared.transfer_s = 0.0

    if how == "drain":
        victim = next(
            name
            for name, server in system.servers.items()
            if server.role == "decode" and server.bodies
        )
        url = f"{system.admin_url}/kvrs/v1/drain/{victim}?drain_s=0"
        async with system.http.post(url) as response:
            assert response.status == 200, await response.text()
        assert await stream == expected_ids(PROMPT, TOKENS)
    else:
        with pytest.raises(AssertionError):
            await stream

    assert (room.aborted, await kept(system)) == ({}, 1)
    await until_none_is_kept(system)
    assert room.aborted == {"decode": True}


async def test_the_place_of_a_detached_pair_is_taken_until_it_is_closed(sglangs: Builder) -> None:
    """Decode holds its pages as before, so no other pair has room for its own."""

    def prepare(servers: Servers) -> None:
        one_decode(servers)
        servers["d0"].max_running = 1

    system = await sglangs(prepare)
    system.shared.transfer_s = 5.0
    stream, room = await begun(system)
    system.shared.transfer_s = 0.0
    await leave(stream)

    ids = await system.ids()

    assert ids == expected_ids(PROMPT, TOKENS)
    other = [*system.shared.rooms.values()][1]
    assert other.has_begun
    assert room.ended_s["decode"] <= other.ended_s["decode"]
    assert room.aborted == {"decode": True}


async def test_a_decode_server_whose_transfer_hangs_gets_none_where_another_is(
    sglangs: Builder,
) -> None:
    """For TRANSFER_S behind the pair's end; then it is one like any other."""
    system = await sglangs()
    stream, room, hung = await hanging(system)
    await leave(stream)
    await until_none_is_kept(system)
    assert room.aborted == {"prefill": False, "decode": False}

    async def served(count: int) -> int:
        system.servers[hung].bodies.clear()
        for number in range(count):
            assert await system.ids([number, 8, 9]) == expected_ids([number, 8, 9], TOKENS)
        return len(system.servers[hung].bodies)

    row = next(row for row in (await system.state())["instances"] if row["id"] == hung)
    assert row["answers"]["hung_transfer_s"] > TRANSFER_S - 2
    assert await served(8) == 0
    await asyncio.sleep(TRANSFER_S)
    assert await served(8) > 0


async def test_the_only_decode_server_is_used_though_its_transfer_hangs(sglangs: Builder) -> None:
    system = await sglangs(one_decode)
    stream, _, _ = await hanging(system)
    await leave(stream)
    await until_none_is_kept(system)

    assert await ends(system) == {"hung": 1}
    assert await system.ids() == expected_ids(PROMPT, TOKENS)


async def test_a_leg_lost_in_its_transfer_keeps_its_decode_server_off_at_once(
    sglangs: Builder,
) -> None:
    """Prefill's death: decode keeps the pages of the transfer for TRANSFER_S."""
    system = await sglangs()
    stream, room, name = await hanging(system)
    other = {"d0": "d1", "d1": "d0"}

    room.legs["prefill"].connection.abort()

    assert await stream == expected_ids(PROMPT, TOKENS)
    again = [*system.shared.rooms.values()][1]
    assert again.bodies["decode"] in system.servers[other[name]].bodies
    rows = {row["id"]: row for row in (await system.state())["instances"]}
    assert rows[name]["answers"]["hung_transfer_s"] > 0 == rows[other[name]]["detached_pairs"]


async def test_only_so_many_pairs_are_kept(
    sglangs: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones are closed at once, and counted."""
    monkeypatch.setattr(abandoned, "MOST_KEPT", 1)
    system = await sglangs()
    system.shared.transfer_s = 5.0
    first, room = await begun(system)
    second, other = await begun(system)
    await leave(first)
    await leave(second)

    await system.until(lambda: is_true(len(other.ended_s) == 2))
    assert (room.ended_s, await kept(system)) == ({}, 1)
    await until_none_is_kept(system)
    assert await ends(system) == {"began": 1, "dropped": 1}


async def test_detached_pairs_end_with_the_proxy(sglangs: Builder) -> None:
    system = await sglangs()
    system.shared.transfer_s = LONG_S
    stream, room = await begun(system)
    await leave(stream)

    await system.proxy.close()

    await asyncio.sleep(1.0)
    assert system.open_legs == 0
    assert room.aborted == {"prefill": False, "decode": False}


async def test_a_detached_pair_keeps_its_place_in_the_share_of_its_tenant(
    sglangs: Builder, tmp_path: Path
) -> None:
    """Its own stream needs no second one to go on; another one gets 429 until it is closed."""
    key_file, key = tmp_path / "keys", "key-of-a"
    tenant = {"keys": [key_hash(key.encode()).hex()], "streams": 1}
    key_file.write_bytes(msgspec.json.encode({"a": tenant}))
    key_file.chmod(0o600)
    system = await sglangs(proxy={"token_gap_s": 0.5}, security={"key_file": str(key_file)})
    system.http.headers["Authorization"] = f"Bearer {key}"
    system.shared.transfer_s = 20.0
    stream, _ = await begun(system)
    system.shared.transfer_s = 0.0

    assert await stream == expected_ids(PROMPT, TOKENS)
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert await kept(system) == 1
    assert (await system.ask(body))[0] == 429
    await until_none_is_kept(system)

    assert (await system.ask(body))[0] == 200


@pytest.mark.parametrize(("version", "are_held"), [("0.5.22", False), ("0.5.23", True)])
async def test_a_version_that_gives_pages_of_aborted_calls_away_is_told_at_the_start(
    sglangs: Builder, caplog: pytest.LogCaptureFixture, version: str, are_held: bool
) -> None:
    """In the log, and in the state for doctor."""

    def prepare(servers: Servers) -> None:
        for server in servers.values():
            server.version = version

    system = await sglangs(prepare)

    rows = (await system.state())["instances"]
    assert {row["aborted_transfers"]["are_held"] for row in rows} == {are_held}
    told = [each for each in caplog.records if "aborted transfers" in each.getMessage()]
    assert len(told) == (0 if are_held else len(rows))


async def test_servers_between_which_no_kv_moves_are_not_judged(sglangs: Builder) -> None:
    def prepare(servers: Servers) -> None:
        del servers["p0"], servers["p1"]
        for server in servers.values():
            server.mode, server.version = "null", "0.5.1"

    system = await sglangs(prepare)

    assert {row["aborted_transfers"] for row in (await system.state())["instances"]} == {None}
