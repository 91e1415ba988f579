"""Instances whose stages are in hosts, which keep parts of each other's pages: real hosts."""

import asyncio
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import RestartReport, StageInfo
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.requests import GenerationRun
from kvrs_testkit.forked import ForkedProcess
from kvrs_testkit.free_ports import free_ports
from tests.engine.peers import PeerEngine, _introduce
from tests.engine.ranks.on_nodes import SECRET, hosting

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process, pytest.mark.nightly]

P = 16
PAGES = 64
TOKENS = 90
PATIENCE_S = 300.0


def prompt(family: int, tokens: int = 70) -> list[int]:
    return [(7 * at * at + 31 * family + 3) % 500 + 2 for at in range(tokens)]


def body(
    stream: str, family: int, *, protected: bool = True, tokens: int = TOKENS
) -> dict[str, Any]:
    kvrs: dict[str, Any] = {"stream": stream, "attempt": 1, "prompt_tokens": 70}
    if protected:
        kvrs["checkpoints"] = [{"agent": "a peer", "reserved_bytes": 1}]
    return {
        "model": "tiny",
        "prompt": prompt(family),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "kvrs": kvrs,
    }


def config_of(model: Path, members: int, **backup: Any) -> Config:
    """d0, d1, ... of two stages each, a node for each stage."""
    ports = iter(free_ports(2 * members))
    nodes: list[dict[str, Any]] = []
    for index in range(members):
        name = f"d{index}"
        hosts = [{"node": f"{name}-n{stage}", "port": next(ports)} for stage in (0, 1)]
        divided = {"id": name, "role": "both", "pp": 2, "group": "g", "stage_hosts": hosts}
        nodes += [{"id": f"{name}-n0", "instances": [divided]}, {"id": f"{name}-n1"}]
    engine = {"pages": PAGES, "page_size_tokens": P, "max_model_len": 256}
    return parse_config(
        {
            "backup": {"mode": "peer", **backup},
            "cluster": {"model": str(model), "engine": engine, "nodes": nodes},
        }
    )


@dataclass
class Member:
    name: InstanceId
    engine: PeerEngine

    @property
    def instance(self) -> EngineInstance:
        return self.engine.instance

    @property
    def ranks(self) -> RanksOnNodes:
        assert isinstance(self.instance.ranks, RanksOnNodes)
        return self.instance.ranks

    @property
    def stages(self) -> list[StageInfo]:
        return self.instance.load().stages

    @property
    def restarts(self) -> list[RestartReport]:
        return self.instance.load().restarts

    @property
    def way(self) -> Way | None:
        now = self.ranks.now.reforming
        return None if now is None else now.way

    @property
    def borrows(self) -> bool:
        return bool(self.ranks.loans) and all(
            loan.table is not None for loan in self.ranks.loans.values()
        )

    async def stopped(self, run: GenerationRun, tokens: int) -> int:
        """Hold the run once it has so many; returns how many pages of it are replicated then."""
        await self.engine.until(lambda: len(run.sequence.token_ids) >= tokens)
        self.engine.may_compute.clear()
        await asyncio.sleep(0.1)  # A batch that is computed ends.
        await self.engine.until(lambda: self.replicated(run) == run.sequence.computed_tokens // P)
        return run.sequence.computed_tokens // P

    def replicated(self, run: GenerationRun) -> int:
        """Pages of which all parts are where they go."""
        ring = self.instance._ring
        assert ring is not None
        held = ring.backlog.held(run.sequence)
        return min((held.get(name, 0) for name in ring.agents), default=0)


@dataclass
class Group:
    config: Config
    members: list[Member]
    directory: Path
    hosts: dict[tuple[str, int], ForkedProcess]
    processes: ExitStack

    def kill(self, name: str, stage: int) -> None:
        host = self.hosts.pop((name, stage))
        host.send_signal(signal.SIGKILL)
        host.wait()

    async def start(self, name: str, stage: int) -> None:
        """A host again."""
        starting = hosting(self.config, self.directory, stage, InstanceId(name))
        self.hosts[name, stage] = await asyncio.to_thread(self.processes.enter_context, starting)


@asynccontextmanager
async def group_of(
    model: Path, directory: Path, members: int = 2, **backup: Any
) -> AsyncIterator[Group]:
    config = config_of(model, members, **backup)
    names = [InstanceId(f"d{index}") for index in range(members)]
    places = [(name, stage) for name in names for stage in (0, 1)]
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())

        def host(place: tuple[InstanceId, int]) -> ForkedProcess:
            own = directory / f"{place[0]}-{place[1]}"
            own.mkdir()
            return processes.enter_context(hosting(config, own, place[1], place[0]))

        with ThreadPoolExecutor(len(places)) as threads:
            started = threads.map(host, places)
            hosts = {(str(name), at): own for (name, at), own in zip(places, started, strict=True)}
        found: list[Member] = []
        for name in names:
            instance = await asyncio.to_thread(EngineInstance, config, name, 1, SECRET)
            stack.push_async_callback(instance.close)
            await instance.start()
            found.append(Member(name, PeerEngine(instance)))
            stack.callback(found[-1].engine.may_compute.set)
        for one in found:
            one.engine.computed.clear()
            for other in found:
                _introduce(one.instance, other.instance)
        async with asyncio.timeout(PATIENCE_S):
            yield Group(config, found, directory, hosts, processes)
        for one in found:
            assert one.instance.failed() is None
            one.instance.pages.check()
            assert one.instance._ring is not None
            one.instance._ring.check()


async def expected(member: Member, family: int, tokens: int = TOKENS) -> list[int]:
    """Undisturbed; nothing of it is left after."""
    asked = body("undisturbed", family, protected=False, tokens=tokens)
    token_ids = await member.engine.answer(asked)
    member.instance.pages.reset_cache()
    return token_ids


async def test_a_borrower_computes_what_no_replica_has_and_nothing_else(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The lender has all full pages, and lends those very ones; of a page that its own stream uses
    a copy; and the same pages at each stage where both are lost. Both are exact, and the borrower
    also once its hosts are back.
    """
    async with group_of(tiny_model, tmp_path) as group:
        own, lender = group.members
        part_bytes = own.ranks.geometry.page_bytes // 2
        for family, is_shared, lost in ((1, False, [1]), (2, True, [1]), (3, False, [0, 1])):
            name, tokens = f"ours {family}", await expected(lender, family)
            theirs = await lender.engine.begin(body("theirs", family)) if is_shared else None
            if theirs is not None:
                await lender.stopped(theirs, 100)
            before = sent(own)
            run = await own.engine.begin(body(name, family))
            count = await own.stopped(run, 130)
            history = len(run.sequence.token_ids)
            used = [] if theirs is None else theirs.sequence.pages[: 100 // P]
            fresh_bytes = part_bytes * (count - len(used))
            assert sent(own) == [each + fresh_bytes for each in before]

            own.engine.computed.clear()
            for stage in lost:
                group.kill("d0", stage)
            own.engine.may_compute.set()
            await own.engine.until(lambda lost=lost: own.borrows and [*own.ranks.loans] == lost)  # type: ignore[misc]
            loan = own.ranks.loans[1]
            assert all(each.pages == loan.pages for each in own.ranks.loans.values())
            assert await own.engine.rest_of(run) == tokens
            assert own.engine.computed[0].start == count * P
            assert sum(map(len, own.engine.computed)) == 70 + TOKENS - 1 - count * P
            restart = own.restarts[-1]
            assert (restart.stream, restart.adopted_pages) == (name, count)
            assert restart.recomputed_tokens == history - count * P
            assert len(loan.tags) == count
            assert not {*used} & {*loan.pages}

            for stage in lost:
                await group.start("d0", stage)
            await own.engine.until(lambda: not own.ranks.loans)
            if theirs is not None:
                lender.engine.may_compute.set()
                assert await lender.engine.rest_of(theirs) == tokens
            # From the own cache, which was copied home with what the lender had.
            own.engine.computed.clear()
            assert await own.engine.answer(body("again", family, protected=False)) == tokens
            assert own.engine.computed[0].start == 64
            await own.engine.until(lambda: lender.instance.load().lends == [])
            own.instance.pages.reset_cache()
            lender.instance.pages.reset_cache()


async def test_a_host_that_is_back_gets_what_a_neighbour_has(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It is the lost part of each page, where the neighbour does not lend its own host."""
    async with group_of(tiny_model, tmp_path) as group:
        own, other = group.members
        tokens = await expected(other, 1)
        run = await own.engine.begin(body("b", 1))
        count = await own.stopped(run, 130)
        other.instance.drain()
        own.engine.computed.clear()

        group.kill("d0", 1)
        own.engine.may_compute.set()
        await own.engine.until(lambda: own.way is Way.WAIT)
        await group.start("d0", 1)
        assert await own.engine.rest_of(run) == tokens

        (asked,) = own.engine.asked
        assert asked[0] == "d1"
        assert asked[1].part is not None
        assert {*asked[1].part.part.layers} == {2, 3}
        assert own.engine.computed[0].start == count * P
        assert own.restarts[-1].adopted_pages == 0
        assert own.restarts[-1].recomputed_tokens <= 2 * P


def sent(member: Member) -> list[int]:
    return [stage.replica_sent_bytes for stage in member.stages]
