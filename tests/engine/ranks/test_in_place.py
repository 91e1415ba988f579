"""Whatever ranks are lost and whenever, an instance goes on with exact bits: real SIGKILLs."""

import asyncio
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer

from kvrs.config.cluster import ElasticSettings, EngineSettings, Planner
from kvrs.config.file import parse_config
from kvrs.errors import RanksLostError
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs_engine.elastic import waiting
from kvrs_engine.elastic.plans import Move
from kvrs_engine.elastic.reforming import ReformingPhase
from kvrs_engine.elastic.ways import PLANNERS, Way
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.reformed import Reformed
from kvrs_engine.engine.routes import make_routes
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.ports import instance_client
from tests.engine.guesses import Guesses
from tests.engine.ranks.test_rank_group import SETTINGS, group_of, unit_bytes
from tests.engine.serving import SECRET

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.usefixtures("patient"),
]

TOKENS = [(11 * at * at + 5) % 500 for at in range(90)]
LIST: dict[str, Any] = {
    "ignore_eos": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "list",
            "schema": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 60},
        },
    },
}
CUTS = [0, 40, 41, 62, 89, 90]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[torch.Tensor]:
    worker = Worker(tiny_model, SETTINGS)
    return [worker.execute([chunk]) for chunk in chunks()]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[int]]:
    """The tokens of one process, which has neither ranks nor faults."""
    return asyncio.run(answers_of(tiny_model, {}, []))


@pytest.fixture(scope="module")
def list_alone(tiny_model: Path) -> list[list[int]]:
    """The same in JSON mode."""
    return asyncio.run(answers_of(tiny_model, {}, [], fields=LIST))


def chunks() -> Iterator[Chunk]:
    for first, last in pairwise(CUTS):
        yield Chunk(TOKENS[first:last], first, range(10, 20), logits=min(3, last - first))


def compute(group: RankGroup, expected: Iterable[torch.Tensor]) -> None:
    """All chunks, each as often as ranks are lost in it."""
    for chunk, logits in zip(chunks(), expected, strict=True):
        while True:
            try:
                found = group.execute([chunk])
            except RanksLostError:
                group.on_lost()
            else:
                assert same_bytes(found, logits)
                break


def kill(group: RankGroup, *ranks: int) -> None:
    for pid in [group.pids[rank] for rank in ranks]:
        os.kill(pid, signal.SIGKILL)


def when_moving(
    group: RankGroup,
    then: Callable[[], object] = lambda: None,
    before: Callable[[list[Move]], object] = lambda moves: None,
) -> None:
    """Do something once, before the next moves are ordered, or as soon as they are."""
    fetch = group.processes.fetch

    def hooked(epoch: int, moves: Collection[Move], *, nice: int = 0) -> None:
        group.processes.fetch = fetch  # type: ignore[method-assign]
        before(list(moves))
        fetch(epoch, moves, nice=nice)
        then()

    group.processes.fetch = hooked  # type: ignore[method-assign]


def damage(group: RankGroup, move: Move) -> None:
    """In the memory of the rank that has it."""
    at = group.processes.seats[move.source].units[move.unit]
    at.memory.memory[at.offset : at.offset + 4] = b"\xff\x00\xff\x00"


def start_missing(group: RankGroup) -> None:
    """Start the ranks that are missing, now."""
    for missing in group._machine.waiting.missing.values():
        missing.due_s = 0.0
    group.processes.told.put(None)


@pytest.mark.parametrize("planner", PLANNERS)
def test_ranks_are_lost_in_mid_move_and_together_and_come_back(
    tiny_model: Path,
    expected: list[torch.Tensor],
    planner: Planner,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of four uneven ranks is lost, and another one during the move: their memory is used where
    it is. Then a device is lost, and a unit is damaged where a new rank copies it. The bytes read
    are those of the plans, and survivors stay the same processes.
    """
    monkeypatch.setattr(waiting, "AGAIN_S", 3600.0)  # They come back when all is looked at.
    group = group_of(tiny_model, ElasticSettings(planner=planner), tp=4)
    first = group.pids
    try:
        compute(group, expected)
        when_moving(group, lambda: kill(group, 2))
        kill(group, 3)
        compute(group, expected)
        assert {0: first[0], 1: first[1]}.items() <= group.pids.items()
        reshard = group.reformer.done[0]
        assert (reshard.way, reshard.degree) == (Way.RESHARD, 2)
        # The second one may still give something itself, before its end is known.
        given = reshard.moved["kept"] + reshard.moved.get("peer", 0)
        assert (given, reshard.moved["read"]) == (reshard.peer_bytes, 0)
        assert reshard.moved["kept"] > 0
        assert (reshard.on_demand is None) == (planner == "on_demand")
        (line,) = (one for one in caplog.records if one.message == "the ranks compute again")
        logged = {key: at for key, at in vars(line).items() if key.endswith("_bytes")}
        assert logged["peer_bytes"] == reshard.peer_bytes
        if reshard.on_demand is not None:
            assert logged["on_demand_peer_bytes"] == reshard.on_demand.peer_bytes
        when_moving(group, before=lambda moves: damage(group, moves[0]))
        start_missing(group)
        while len(group.layout.ranks) < 4:
            compute(group, expected)

        assert group.pids[0] == first[0]
        damaged, whole = group.reformer.done[1:]
        assert damaged.moved["damaged"] == 1
        assert damaged.moved["read"] == damaged.moved["host"] > damaged.host_bytes == 0
        assert whole.moved == {"peer": whole.peer_bytes, "read": 0}
        group.lose_device(1)
        group.on_restart()
        kill(group, 2)
        compute(group, expected)
        assert 1 not in group.lost_devices or 1 not in group.layout.ranks
    finally:
        group.close()


@pytest.mark.nightly
def test_a_rank_that_is_lost_in_the_probe_leaves_no_other_waiting(
    tiny_model: Path, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(tiny_model, tp=4)
    first, probe = group.pids, group.probe

    def killing(formation: RankFormation) -> torch.Tensor:
        monkeypatch.setattr(group, "probe", probe)
        kill(group, 1)
        return probe(formation)

    monkeypatch.setattr(group, "probe", killing)
    with ThreadPoolExecutor(1) as pool:
        try:
            compute(group, expected)
            kill(group, 3)
            pool.submit(compute, group, expected).result(120)

            assert {0: first[0], 2: first[2]}.items() <= group.pids.items()
            assert group.reformer.done[0].degree == 2
        finally:
            group.close()


@pytest.mark.nightly
def test_a_stage_without_ranks_is_started_again(
    tiny_model: Path, tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    """With its units where they were, as long as their memory is there, else read again. What
    cannot be started ends the instance, with the reason.
    """
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    group = group_of(model, pp=2)
    half = unit_bytes(group)[1]
    try:
        compute(group, expected)
        kill(group, 1)
        compute(group, expected)
        (restart,) = group.reformer.done
        assert (restart.way, restart.host_bytes) == (Way.RESTART, 0)
        assert not any(restart.moved.values())

        group.lose_device(1)
        group.on_restart()
        compute(group, expected)
        replace = group.reformer.done[-1]
        assert (replace.way, replace.host_bytes) == (Way.REPLACE, half)
        assert replace.moved["read"] == half

        model.rename(tmp_path / "elsewhere")
        kill(group, 0)
        with pytest.raises(RanksLostError, match="started 3 times"):
            compute(group, expected)
    finally:
        group.close()


@pytest.mark.nightly
def test_weights_that_have_changed_are_not_computed_with(
    tiny_model: Path, tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    """A survivor that reads other weights than the lost rank had ends, as does each process that is
    started for them. While the lost rank's memory is there, nothing is read.
    """
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    group = group_of(model, tp=2)
    try:
        compute(group, expected)
        path = model / "model.safetensors"
        content = bytearray(path.read_bytes())
        header_bytes = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_bytes])
        start, stop = header["model.layers.2.mlp.up_proj.weight"]["data_offsets"]
        base = 8 + header_bytes
        content[base + start : base + stop] = bytes(stop - start)
        path.write_bytes(content)

        kill(group, 1)
        compute(group, expected)
        assert group.reformer.done[0].way is Way.RESHARD
        while len(group.layout.ranks) < 2:
            compute(group, expected)
        group.lose_device(1)
        group.on_restart()
        with pytest.raises(RanksLostError):
            compute(group, expected)
    finally:
        group.close()


@pytest.mark.nightly
def test_what_a_lost_process_has_left_is_a_units_own_memory_afterwards(
    tiny_model: Path, expected: list[torch.Tensor]
) -> None:
    """One that was damaged is read into it. It outlives the lost rank's seat, and the process that
    got it; a device that is lost takes it along.
    """
    group = group_of(tiny_model, tp=4)
    try:
        compute(group, expected)
        when_moving(group, before=lambda moves: damage(group, moves[0]))
        kill(group, 3)
        compute(group, expected)
        first = group.reformer.done[0]
        assert first.moved["damaged"] == 1
        assert first.moved["host"] == first.moved["read"] > first.host_bytes == 0
        assert first.moved["kept"] == first.peer_bytes - first.moved["host"]

        while group.reforming is not None or len(group.layout.ranks) < 4:
            compute(group, expected)
        kill(group, 2)
        compute(group, expected)
        group.lose_device(0)
        group.on_restart()
        compute(group, expected)
        losses = [each for each in group.reformer.done if each.way is Way.RESHARD]
        assert losses[-1].moved["read"] == losses[-1].host_bytes > 0
    finally:
        group.close()


@pytest.mark.nightly
@pytest.mark.parametrize("planner", PLANNERS)
async def test_streams_go_on_in_their_attempts(
    tiny_model: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, planner: Planner
) -> None:
    """Greedy and drawn ones, through a rank that leaves by order, a SIGKILL and a lost device, have
    the tokens of one process; load reports say at once that the ranks re-form, and when they
    compute again, and so does the engine, of each pause. That a rank leaves or joins is no pause.
    Of what the leaving rank has nothing is read from the host.
    """
    reports: list[dict[str, Any]] = []
    left: list[Reformed] = []
    tables: list[PrefillTable] = []
    told: list[bool] = []
    waits = AdmissionWaitEstimator
    monkeypatch.setattr(waits, "pause", lambda *_: told.append(True))
    monkeypatch.setattr(waits, "go_on", lambda *_: told.append(False))
    faults = ["leave", "kill", "lose_device"]
    elastic = {"planner": planner}
    through = await answers_of(
        tiny_model, {"tp": 3}, faults, reports, left, elastic=elastic, tables=tables
    )

    assert through == alone
    assert (left[0].way, left[0].degree, left[0].paused) == (Way.RESIZE, 2, False)
    assert left[0].moved == {"peer": left[0].peer_bytes, "read": 0}
    assert left[0].host_bytes == 0 < left[0].peer_bytes
    reforming = [each["reforming"] for each in reports if each["reforming"] is not None]
    ways = {each["way"] for each in reforming}
    assert "reshard" in ways
    assert "resize" not in ways
    assert all(each["lost"] for each in reforming if each["way"] == "reshard")
    assert any(each["missing_pages"] for each in reforming)
    page_s = tables[0].page_s(EngineSettings().page_size_tokens)
    assert all(
        each["page_s"] == pytest.approx(page_s * each["prefill_factor"]) for each in reforming
    )
    # Those that are left have the step times that were predicted of them.
    alone_on = [each for each in reports if each["degree"] == 1]
    predicted = [each["reforming"] for each in alone_on if each["reforming"] is not None]
    serving = [each["decode_factor"] for each in alone_on if each["reforming"] is None]
    assert {each["decode_factor"] for each in predicted} == {*serving}
    assert reports[0]["decode_factor"] == reports[0]["prefill_factor"] == 1.0
    assert {each["epoch"] for each in reports} == {1}
    assert reports[0]["degree"] == reports[0]["full_degree"] == 3
    assert min(each["degree"] for each in reports) == 1
    assert {each["rank_deaths"] for each in reports} == {0, 1, 2}
    assert not told[0]
    assert [was for was, now in pairwise(told) if was != now].count(True) >= 2


@pytest.mark.nightly
async def test_a_device_without_cells_takes_nothing_from_streams(
    tiny_model: Path, alone: list[list[int]]
) -> None:
    """There are more ranks than KV heads: streams go on from where they were."""
    reports: list[dict[str, Any]] = []
    lost: list[int] = []

    through = await answers_of(tiny_model, {"tp": 4}, ["lose_bare_device"], reports, lost=lost)

    assert through == alone
    # A report that the ranks re-form may come when they have, which takes no longer than a report.
    assert {each["rank_deaths"] for each in reports} == {0, 1}
    assert lost == [0]


@pytest.mark.nightly
async def test_json_mode_goes_on_among_ranks(tiny_model: Path, list_alone: list[list[int]]) -> None:
    """Its mask follows from the history at whichever rank answers: the tokens are those of one
    process, also where a rank is killed in the middle.
    """
    through = await answers_of(tiny_model, {"tp": 2}, ["kill"], fields=LIST)

    assert through == list_alone
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    for each in map(tokenizer.decode, list_alone):
        assert re.fullmatch(r'\s*\[[\s,"ab]*\]?\s*', each), each


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=str)
async def test_drafts_are_verified_where_ranks_are_lost(
    tiny_model: Path, list_alone: list[list[int]], ranks: dict[str, int]
) -> None:
    """Batches with drafts, of two stages two at a time, are dropped and computed again."""
    guesses = Guesses(list_alone)

    through = await answers_of(
        tiny_model, ranks, ["kill", "lose_device"], fields=LIST, drafts=guesses
    )

    assert through == list_alone
    assert 0 < guesses.accepted < guesses.proposed


async def answers_of(
    model: Path,
    ranks: dict[str, int],
    faults: list[str],
    reports: list[dict[str, Any]] | None = None,
    done: list[Reformed] | None = None,
    lost: list[int] | None = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
    elastic: Mapping[str, Any] = MappingProxyType({}),
    tables: list[PrefillTable] | None = None,
    drafts: Guesses | None = None,
) -> list[list[int]]:
    """`lost`: of how many streams cells were lost; `tables`: of the instance's prefill."""
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both", **ranks}]}]
    config = parse_config(
        {
            "cluster": {"model": str(model), "engine": {"pages": 512}, "nodes": nodes},
            "elastic": dict(elastic),
        }
    )
    instance = EngineInstance(config, InstanceId("e0"), 1, SECRET)
    if drafts is not None:
        instance.core._drafts = drafts
        instance.core.hooks.append(drafts)
    async with asyncio.timeout(600), instance_client(make_routes(instance), SECRET) as client:
        await instance.start()
        watching = asyncio.create_task(watch(client, reports if reports is not None else []))
        try:
            tasks = [asyncio.create_task(answer(client, at, fields)) for at in range(8)]
            for fault in faults:
                await befall(instance, client, fault)
            if done is not None and isinstance(instance.ranks, RankGroup):
                done += instance.ranks.reformer.done
            if lost is not None:
                lost.append(len(instance.core.missing_pages))
            if tables is not None:
                tables.append(instance.prefill)
            return list(await asyncio.gather(*tasks))
        finally:
            watching.cancel()
            await instance.close()


async def befall(instance: EngineInstance, client: aiohttp.ClientSession, fault: str) -> None:
    """Once it is computing, a rank is lost in that way; returns when the process is gone."""
    group = instance.ranks
    assert isinstance(group, RankGroup)
    while instance.core.scheduler.running < 4 or group.reforming or group.lost:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    serving = group.layout.ranks
    rank = min(serving) if fault == "lose_bare_device" else max(serving)
    pid = group.pids[rank]
    if fault == "leave":
        await leave(client, instance.epoch, rank)
    elif fault == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        instance.lose_device(rank)
    while group.pids.get(rank) == pid:
        await asyncio.sleep(0.01)


async def leave(client: aiohttp.ClientSession, epoch: int, rank: int) -> None:
    """Another process of the instance would refuse, and this one while a rank comes back."""
    order = {"rank": rank, "leaves": True, "epoch": epoch + 1}
    async with client.post("/kvrs/v1/ranks", json=order) as response:
        assert await response.json() == {"refused": f"epoch: got {epoch + 1}; allowed: {epoch}"}
    while True:
        async with client.post("/kvrs/v1/ranks", json=order | {"epoch": epoch}) as response:
            refused = (await response.json())["refused"]
        if refused is None:
            return
        assert f"allowed: while the ranks are {ReformingPhase.SERVING}" in refused
        await asyncio.sleep(0.01)


async def watch(client: aiohttp.ClientSession, reports: list[dict[str, Any]]) -> None:
    # So rarely that all but the first are told before their time.
    async with client.get("/kvrs/v1/load?watch=600") as response:
        async for line in response.content:
            reports.append(json.loads(line))


async def answer(client: aiohttp.ClientSession, seed: int, fields: Mapping[str, Any]) -> list[int]:
    choose = random.Random(seed)
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [choose.randrange(2, 500) for _ in range(choose.randint(8, 150))],
        "max_tokens": 150,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0.9 * (seed % 2),
        "seed": seed,
        "stream": True,
        **fields,
    }
    token_ids: list[int] = []
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[len(b"data: ") :])
                assert "error" not in event, event
                token_ids += event["choices"][0].get("token_ids") or []
    return token_ids
