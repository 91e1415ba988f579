"""The connector's page port in its thread, with a real agent: what it fetches for a restore, and
what is left of streams that have ended.
"""

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    MEMORY,
    CheckpointTarget,
    FenceRequest,
    FetchReport,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    SourceRange,
)
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.peers import PullResult
from kvrs.vllm.port import ConnectorPort
from kvrs.vllm.staging import Staging
from kvrs.vllm.tracked import CopyRequest, FilledPages, Restore, SavedStream
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of
from tests.agent.agents import (
    PAGE_BYTES,
    SECRET,
    Engine,
    ask,
    document,
    flip_a_byte,
    page,
    running,
    tags,
)

pytestmark = pytest.mark.network

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=256, dtype_bytes=4, page_size_tokens=32)
AGENT = InstanceId("agent-n0")
STREAM = StreamId("ab" * 16)
HELD = 6  # Pages of family 1 that the agent has.
DEADLINE_S = 20.0


def config_of(path: Path) -> Config:
    written = document(path)
    port, connector_port = free_ports(2)
    instance = {"id": "d0", "role": "decode", "port": port, "connector_port": connector_port}
    written["cluster"]["nodes"][0]["instances"] = [instance]
    written["cluster"] |= {"backend": "vllm", "model": str(path)}
    written["profiles"] = {"prefill": "opt-13b-a100-distserve-tp1"}
    written["transfer"]["stall_timeout_s"] = DEADLINE_S
    return parse_config(written)


class World:
    """A port and what vLLM's scheduler is for it."""

    def __init__(self, config: Config, fingerprint: str, pages: int) -> None:
        (node,) = config.cluster.nodes
        self.config = config
        self.staging = Staging(pages, PAGE_BYTES)
        self.copies: list[CopyRequest] = []
        self.off_reason: str | None = None
        self.port = ConnectorPort(
            config,
            node,
            node.instances[0],
            [SECRET],
            GEOMETRY,
            fingerprint,
            self.staging,
            self.copies.append,
            lambda: self.off_reason,
            lambda: self.staging.used,
            1,
        )

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.005)

    def client(self) -> aiohttp.ClientSession:
        """A client that proves itself, like proxies and agents."""
        settings = self.port.settings
        key = scoped_key(SECRET, Scope.INSTANCE, settings.id)
        return client_of(f"http://{settings.host}:{settings.connector_port}", key)

    async def report(self) -> LoadReport:
        async with self.client() as client:
            return await ask(client, "/kvrs/v1/load", LoadReport)

    async def fetch(self, *sources: SourceRange, first_page: int = 0, pages: int = HELD) -> Restore:
        """A restore whose pages have all come that come."""
        restore = self.begin(*sources, first_page=first_page, pages=pages)
        await self.until(lambda: restore.is_over)
        assert [bytes(self.staging.view(slot)) for slot in restore.slots] == [
            page(tag) for tag in restore.tags[first_page : first_page + len(restore.slots)]
        ]
        return restore

    def begin(
        self, *sources: SourceRange, first_page: int = 0, pages: int = HELD, slot_token: int = 0
    ) -> Restore:
        restore = Restore(STREAM, (0, 2), [*tags(1, pages)], sources, 9e9, first_page, slot_token)
        self.port.fetch(restore)
        return restore


@asynccontextmanager
async def opened(
    path: Path, fingerprint: str = "model", pages: int = 16
) -> AsyncIterator[tuple[World, Engine]]:
    """The agent has `HELD` pages, in epoch 1."""
    config = config_of(path)
    async with running(config), Engine(config) as engine:
        await engine.offer("s", HELD)
        await engine.store("s", 0, tags(1, HELD))
        world = World(config, fingerprint, pages)
        await asyncio.to_thread(world.port.start)
        try:
            yield world, engine
        finally:
            await asyncio.to_thread(world.port.close)


def of(first: int, pages: int, agent: InstanceId = AGENT, generation: int = 1) -> SourceRange:
    return SourceRange(agent, first, pages, generation)


NOBODY = InstanceId("agent-n9")


@pytest.mark.parametrize(
    ("sources", "found", "fault"),
    [
        ([of(0, 6)], 6, ""),
        ([of(0, 4), of(2, 4)], 6, ""),
        ([of(0, 6), of(0, 6)], 6, ""),
        ([of(0, 2), of(3, 3)], 2, "no source has page 2"),
        ([of(0, 9)], 6, ""),
        ([of(0, 2), of(2, 4, NOBODY)], 2, "agent-n9 is no agent of the configuration"),
        ([of(0, 6, NOBODY)], 0, "agent-n9 is no agent of the configuration"),
        ([of(0, 6, generation=2)], 0, "agent-n0: .* epoch 1"),
        ([of(0, 0)], 0, ""),
        ([of(0, 3), of(3, 3, generation=7)], 3, "agent-n0: .* epoch 1"),
        ([of(0, 3, generation=7), of(3, 3)], 0, "agent-n0: .* epoch 1"),
    ],
    ids=lambda each: (
        "-".join(f"{s.first_page}+{s.pages}" for s in each) if isinstance(each, list) else ""
    ),
)
async def test_sources_are_used_as_far_as_they_join(
    tmp_path: Path, sources: list[SourceRange], found: int, fault: str
) -> None:
    """Gaps, overlaps, unknown agents and other generations end a restore at its last good page, and
    it says why.
    """
    async with opened(tmp_path) as (world, _):
        restore = await world.fetch(*sources)

        assert len(restore.slots) == found
        assert re.match(f"{fault}$|{fault}, " if fault else "$", restore.fault)
        world.port.release(restore)
        await world.until(lambda: world.staging.used == 0)


async def test_a_source_that_has_less_than_it_said_is_followed_by_the_next(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _):
        restore = await world.fetch(of(0, 20), of(0, 20), pages=20)
        assert len(restore.slots) == HELD
        assert restore.fault.startswith("agent-n0: it has 0 of ")


async def test_a_restore_may_begin_behind_pages_that_are_here(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _):
        assert len((await world.fetch(of(2, 4), first_page=2)).slots) == 4


async def test_pages_of_another_model_are_not_had(tmp_path: Path) -> None:
    async with opened(tmp_path, fingerprint="another model") as (world, _):
        assert (await world.fetch(of(0, 6))).slots == []
        assert world.port.failure is None


async def test_full_staging_leaves_the_rest_to_be_computed(tmp_path: Path) -> None:
    async with opened(tmp_path, pages=4) as (world, _):
        first = await world.fetch(of(0, 6))
        assert (len(first.slots), first.fault) == (4, "staging had room for 4 of 6 pages")
        second = await world.fetch(of(0, 6))
        assert (second.slots, second.fault) == ([], "staging had room for 0 of 6 pages")

        world.port.release(first)
        await world.until(lambda: world.staging.used == 0)
        assert len((await world.fetch(of(0, 6))).slots) == 4


class Script:
    """Answers of agents in turn, in place of the puller; of one that is a number so many pages come
    and no more.
    """

    def __init__(self, world: World, *answers: PullResult | int) -> None:
        self.answers, self.asked = [*answers], 0
        replaced: Any = world.port.fetches
        self.close = replaced._puller.close
        replaced._puller = self

    async def pull(
        self,
        peer: Any,
        request: Any,
        views: Sequence[memoryview],
        tail: None,
        expected_epoch: int,
        verified: Callable[[int], None],
    ) -> PullResult:
        self.asked += 1
        answer = self.answers.pop(0)
        pages = answer if isinstance(answer, int) else answer.full_pages
        for view, tag in zip(views[:pages], request.tags, strict=False):
            view[:] = page(tag)
            verified(1)
        if isinstance(answer, int):
            await asyncio.get_running_loop().create_future()
        assert isinstance(answer, PullResult)
        return answer


def came(pages: int, error: str | None = None) -> PullResult:
    return PullResult(pages, False, 0, 0.0, False, error)


@pytest.mark.parametrize("error", ["agent-n0 is in epoch 2, not 1", "checksum of page 3 is wrong"])
async def test_an_end_in_mid_pull_keeps_what_had_come(tmp_path: Path, error: str) -> None:
    """The epoch rises, or a page is damaged: another source goes on behind the last good page."""
    async with opened(tmp_path, pages=64) as (world, _):
        script = Script(world, came(16), came(3, error), came(11))

        restore = await world.fetch(*[of(0, 30)] * 3, pages=30)

        assert len(restore.slots) == 30
        assert (script.asked, restore.fault) == (3, "")


async def test_a_damaged_page_counts_once_beside_other_fetches(tmp_path: Path) -> None:
    """For each fetch that got it."""
    async with opened(tmp_path) as (world, _):
        flip_a_byte(tmp_path, page(tags(1, HELD)[2]))

        restores = [world.begin(of(0, HELD)) for _ in range(2)]
        await world.until(lambda: all(each.is_over for each in restores))

        assert [len(each.slots) for each in restores] == [2, 2]
        report = await world.report()
        assert report.connector is not None
        assert (report.damaged_pages, report.connector.pages_damaged) == (2, 2)


async def test_pages_count_when_they_have_come(tmp_path: Path) -> None:
    """The agent stalls in mid-answer: at the deadline the scheduler uses what is there."""
    async with opened(tmp_path) as (world, _):
        Script(world, 4)
        restore = world.begin(of(0, 6))

        await world.until(lambda: len(restore.slots) == 4)

        assert not restore.is_over
        assert world.staging.used == 6
        world.port.release(restore)
        await world.until(lambda: world.staging.used == 0)


@pytest.mark.parametrize(
    ("slots_only", "slot_token", "attempt", "ends"),
    [
        (True, 5, 3, True),
        (True, 0, 3, False),
        (True, 5, 2, False),
        (False, 0, 3, True),
        (False, 5, 2, False),
    ],
)
async def test_a_fence_ends_transfers_of_lower_attempts(
    tmp_path: Path, slots_only: bool, slot_token: int, attempt: int, ends: bool
) -> None:
    """With `slots_only` only those that hold a slot; others are of no interest to the agent."""
    async with opened(tmp_path) as (world, _):
        script = Script(world, 0)
        restore = world.begin(of(0, 6), slot_token=slot_token)
        await world.until(lambda: script.asked)

        fenced = threading.Event()
        world.port._call(lambda: world.port.fence({STREAM: (0, attempt)}, slots_only=slots_only))
        world.port._call(world.port._call, fenced.set)  # Behind what was cancelled.
        await world.until(fenced.is_set)

        assert restore.is_over is ends
        assert restore.fault == ("a fence has ended it" if ends else "")
        assert world.port.epoch == (1 if slots_only else 2)
        world.port.release(restore)
        await world.until(lambda: world.staging.used == 0)


def answer(world: World, copies: Iterable[CopyRequest], own: Sequence[bytes]) -> None:
    """Workers have copied the pages."""
    for copy in copies:
        for index, slot in enumerate(copy.slots):
            world.staging.view(slot)[:] = own[copy.first_page + index]
        world.port.copied([(copy, len(copy.slots))])


async def test_pages_of_a_fenced_attempt_are_not_saved(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, engine):
        pages = tags(2, 4)
        saved = SavedStream("r", STREAM, (0, 1), [*pages], 4 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [], 2 * 32)])
        await world.until(lambda: world.copies)
        answer(world, [world.copies.pop()], [page(tag) for tag in pages])
        await world.until(lambda: world.port.counts.pages_saved == 2)

        world.port._call(lambda: world.port.fence({STREAM: (0, 2)}, slots_only=False))
        world.port.filled([FilledPages(saved, [], 4 * 32)])

        await world.until(lambda: not world.port.backlog.follows(saved))
        assert not world.copies
        assert (await engine.fetch(pages)).full_pages == 2


async def test_pages_that_an_agent_refuses_are_not_counted_as_saved(tmp_path: Path) -> None:
    """A later attempt has taken the stream over between its offer and its pages."""
    async with opened(tmp_path) as (world, engine):
        pages = tags(2, 2)
        saved = SavedStream("r", STREAM, (0, 1), [*pages], 2 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [], 2 * 32)])
        await world.until(lambda: world.copies)
        await engine.offer(STREAM, 2, attempt=2)

        answer(world, [world.copies.pop()], [page(tag) for tag in pages])
        await world.until(lambda: not world.staging.used)

        report = (await world.report()).connector
        assert report is not None
        assert (report.pages_saved, report.lag_pages) == (0, 0)


async def test_pages_that_are_generated_are_saved_by_their_own_tags(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, engine):
        pages = tags(2, 3)
        saved = SavedStream("r", STREAM, (0, 1), [*pages[:1]], 1 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [*pages[1:]], 3 * 32)])
        await world.until(lambda: world.copies)

        answer(world, [world.copies.pop()], [page(tag) for tag in pages])

        await world.until(lambda: world.port.counts.pages_saved == 3)
        assert (await engine.fetch(pages)).full_pages == 3
        assert (await world.report()).kv_bytes["checkpoint"] == 3 * PAGE_BYTES


@pytest.mark.parametrize("send_rest", [False, True])
async def test_what_a_request_leaves_is_sent_if_its_stream_goes_on(
    tmp_path: Path, send_rest: bool
) -> None:
    async with opened(tmp_path) as (world, engine):
        pages = tags(2, 4)
        saved = SavedStream("r", STREAM, (0, 1), [*pages], 4 * 32)
        target = CheckpointTarget(AGENT, 8 * PAGE_BYTES)
        world.port.follow(saved, [target], handed_over=False)
        assert not world.port.is_sent(saved)
        world.port.filled([FilledPages(saved, [], 4 * 32)])
        await world.until(lambda: world.copies)
        world.port.ended(saved, send_rest=send_rest)
        await world.until(lambda: saved.is_ended)
        assert world.port.is_sent(saved) is not send_rest

        answer(world, world.copies, [page(tag) for tag in pages])

        await world.until(lambda: world.port.is_sent(saved) and not world.staging.used)
        if send_rest:
            assert (await engine.fetch(pages)).full_pages == 4


async def test_pages_that_found_no_slot_or_were_not_copied_are_sent_later(tmp_path: Path) -> None:
    """The pages of a copy that were made are sent."""
    async with opened(tmp_path, pages=4) as (world, engine):
        pages, taken = tags(2, 4), world.staging.take(4)
        saved = SavedStream("r", STREAM, (0, 1), [*pages], 4 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        backlog = world.port.backlog

        world.port.filled([FilledPages(saved, [], 2 * 32)])
        await world.until(lambda: backlog.lag_pages == 2 and not backlog.waited_for)
        assert not world.copies
        world.staging.give_back(taken)
        world.port.filled([FilledPages(saved, [], 4 * 32)])

        await world.until(lambda: world.copies)
        copy = world.copies.pop()
        assert len(copy.slots) == 2
        world.staging.view(copy.slots[0])[:] = page(pages[0])
        world.port.copied([(copy, 1)])

        def is_saved() -> bool:
            while world.copies:
                answer(world, [world.copies.pop(0)], [page(tag) for tag in pages])
            return world.port.counts.pages_saved == 4

        await world.until(is_saved)
        await world.until(lambda: world.staging.used == 0)
        assert (await engine.fetch(pages)).full_pages == 4


async def test_a_connector_that_is_off_awaits_no_copies(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _):
        world.off_reason = "an error"
        saved = SavedStream("r", STREAM, (0, 1), [*tags(2, 4)], 4 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [], 4 * 32)])
        backlog = world.port.backlog

        await world.until(lambda: backlog.lag_pages == 4 and not backlog.waited_for)

        assert not world.copies
        assert world.staging.used == 0


async def test_what_was_to_be_sent_is_given_up_in_the_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _):
        saved = SavedStream("r", STREAM, (0, 1), [*tags(2, 4)], 4 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [], 4 * 32)])
        world.port.ended(saved, send_rest=True)
        await world.until(lambda: world.copies)

        world.port.ended(saved, send_rest=False)
        world.port.copied([(world.copies[0], 0)])

        await world.until(lambda: world.port.is_sent(saved) and not world.staging.used)
        assert world.port.backlog.lag_pages == 0


@pytest.mark.parametrize("off_reason", [None, "an error"])
async def test_a_connector_that_is_off_offers_nothing_and_says_why(
    tmp_path: Path, off_reason: str | None
) -> None:
    async with opened(tmp_path) as (world, _), world.client() as client:
        world.off_reason = off_reason

        info = await ask(client, "/kvrs/v1/instance", InstanceInfo)
        report = await ask(client, "/kvrs/v1/load", LoadReport)

        assert bool(info.capabilities) is (off_reason is None)
        assert (info.epoch, info.fingerprint) == (1, "model")
        assert (info.id, info.node, info.role, info.pid) == ("d0", "n0", "decode", os.getpid())
        assert info.geometry == GEOMETRY
        assert report.connector is not None
        assert (report.connector.off_reason, report.connector.fingerprint) == (off_reason, "model")
        assert report.connector.staging_pages == info.fetch_pages_max == world.staging.pages


async def test_a_report_has_what_was_fetched_loaded_and_lags(tmp_path: Path) -> None:
    """Pages of an agent of this host come out of its memory."""
    async with opened(tmp_path) as (world, _):
        world.port.settled(await world.fetch(of(0, HELD)), 4 * 32, 10, "late")
        world.staging.take(world.staging.pages)
        saved = SavedStream("r", STREAM, (0, 1), [*tags(2, 3)], 3 * 32)
        world.port.follow(saved, [CheckpointTarget(AGENT, 8 * PAGE_BYTES)], handed_over=False)
        world.port.filled([FilledPages(saved, [], 3 * 32)])
        await world.until(lambda: world.port.backlog.lag_pages)

        report = await world.report()

        assert report.fetches == [FetchReport(STREAM, 2, 0, 4 * 32, 10, "late")]
        assert report.kv_bytes["recovery"] == HELD * PAGE_BYTES
        assert MEMORY in {link.source for link in report.links}
        assert (report.checkpoint_lag_pages, report.fetched_pages) == (3, 4)
        assert report.connector is not None
        found = report.connector
        assert (found.lag_pages, found.pages_loaded) == (3, 4)
        assert found.pinned_blocks == world.staging.pages


async def test_only_processes_of_the_cluster_are_heard(tmp_path: Path) -> None:
    """Anybody else could fence streams, or read what is fetched for whom."""
    async with opened(tmp_path) as (world, _):
        at = world.port.settings
        async with aiohttp.ClientSession(f"http://{at.host}:{at.connector_port}") as stranger:
            fence = msgspec.json.encode(FenceRequest({STREAM: 3}))
            for answer in (
                await stranger.post("/kvrs/v1/fence", data=fence),
                await stranger.get("/kvrs/v1/load"),
                await stranger.get("/kvrs/v1/instance"),
            ):
                assert answer.status == 401

        assert not world.port.is_fenced(STREAM, (0, 1))
        assert world.port.epoch == 1


async def test_a_proxy_that_watches_gets_every_change(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _), world.client() as client:
        watch = await client.get("/kvrs/v1/load?watch=0.01")
        first = msgspec.json.decode(await watch.content.readline(), type=LoadReport)
        world.off_reason = "an error"

        async with asyncio.timeout(DEADLINE_S):
            later = first
            while later.connector is None or later.connector.off_reason is None:
                later = msgspec.json.decode(await watch.content.readline(), type=LoadReport)
        watch.close()

    assert first.connector is not None
    assert (first.connector.off_reason, later.connector.off_reason) == (None, "an error")


@pytest.mark.parametrize("slots_only", [False, True])
async def test_a_fence_of_slots_leaves_epoch_and_attempts(tmp_path: Path, slots_only: bool) -> None:
    async with opened(tmp_path) as (world, _), world.client() as client:
        fence = FenceRequest({STREAM: 3}, {STREAM: 1}, slots_only)

        info = await ask(client, "/kvrs/v1/fence", InstanceInfo, fence)

        assert info.epoch == (1 if slots_only else 2)
        for attempt in [(1, 2), (0, 9)]:
            assert world.port.is_fenced(STREAM, attempt) is not slots_only
        assert not world.port.is_fenced(STREAM, (1, 3))


async def test_a_fence_is_not_lowered_and_the_last_ones_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrs.vllm.port._MAX_FENCED", 2)
    first, second, third = (StreamId(name * 32) for name in "abc")
    async with opened(tmp_path) as (world, _), world.client() as client:
        for attempts in ({first: 4}, {second: 4}, {first: 2}, {third: 4}):
            await ask(client, "/kvrs/v1/fence", InstanceInfo, FenceRequest(attempts))

        fenced = [each for each in (first, second, third) if world.port.is_fenced(each, (0, 3))]
        assert fenced == [first, third]


async def test_blocks_of_vllm_have_no_leases(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _), world.client() as client:
        update = LeaseUpdate(lease_s=30.0, renew=[STREAM])
        assert await ask(client, "/kvrs/v1/leases", LeaseAnswer, update) == LeaseAnswer([STREAM])


async def test_a_holder_that_is_not_of_the_cluster_is_left_out(tmp_path: Path) -> None:
    """Names come from the proxy; an address never does."""
    async with opened(tmp_path) as (world, engine):
        pages = tags(2, 2)
        saved = SavedStream("r", STREAM, (0, 1), [*pages], 2 * 32)
        targets = [CheckpointTarget(each, 8 * PAGE_BYTES) for each in (NOBODY, AGENT)]
        world.port.follow(saved, targets, handed_over=False)
        world.port.filled([FilledPages(saved, [], 2 * 32)])
        await world.until(lambda: world.copies)
        answer(world, [world.copies.pop()], [page(tag) for tag in pages])

        await world.until(lambda: world.port.counts.pages_saved == 2)
        assert world.port.backlog.lag_pages == 0
        assert (await engine.fetch(pages)).full_pages == 2


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    """Also that of a second engine of the same server."""
    async with opened(tmp_path) as (world, _):
        second = World(world.config, "model", 4)

        with pytest.raises(KvrsError, match="in use"):
            await asyncio.to_thread(second.port.start)

        assert second.port.failure is not None
        assert (await world.report()).epoch == 1


async def test_what_vllm_s_thread_asks_for_behind_its_end_is_ignored(tmp_path: Path) -> None:
    """VLLM ends its parts in any order."""
    async with opened(tmp_path) as (world, _):
        await asyncio.to_thread(world.port.close)

        world.begin(of(0, 2))
        world.port.filled([])
        world.port.close()


async def test_fetches_end_with_the_port(tmp_path: Path) -> None:
    async with opened(tmp_path) as (world, _):
        Script(world, 2)
        restore = world.begin(of(0, 6))
        await world.until(lambda: len(restore.slots) == 2)

        await asyncio.to_thread(world.port.close)

        assert restore.is_over
