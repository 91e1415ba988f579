"""A stage without its own host that loses a donor, or that host again: over scripted hosts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvrs.errors import KvrsError, TransferError
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.ranks import returning
from kvrs_engine.engine.ranks.hosted import HostedStage
from kvrs_engine.engine.ranks.link import StageFacts, StageReady
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.ranks.test_hand_back import (
    KEPT,
    PAGES,
    Hosts,
    ScriptedConnection,
    away,
    once,
)

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors are asked again soon."""
    monkeypatch.setattr(returning, "_AGAIN_S", 0.001)


@asynccontextmanager
async def lost(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[HostedStage, Hosts]]:
    """A stage that has lost its host right now."""
    stage, hosts = await away(0, 1e9, tiny_model, monkeypatch)
    try:
        yield stage, hosts
    finally:
        await stage.close()


async def borrowed(stage: HostedStage) -> None:
    """Wait for a loan, and begin to use it."""
    await once(lambda: stage.loan is not None and stage.connection.error is None)
    assert stage.loan is not None
    assert await stage.take(stage.loan, KEPT, {})
    stage.noted = stage.mended = stage.losses


async def written(stage: HostedStage, text: int) -> dict[int, str]:
    """A page after the other; the last one in part."""
    count = 40 * 16 - 3
    chunks = [Chunk([text] * (count - 480), 480, KEPT, logits=1)]
    await stage.execute([Chunk([text] * 480, 0, KEPT, logits=1)], None, 60.0, 0)
    chunks = [Chunk([text] * 29, 480, KEPT, logits=1)]
    await stage.execute(chunks, None, 60.0, 0)
    return dict.fromkeys(KEPT[:31], f" {text}" * 16) | {KEPT[31]: f" {text}" * 13}


async def test_a_donor_that_is_lost_while_it_is_asked_is_asked_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it lends; meanwhile the instance waits for its own host."""
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        asked: list[Way | None] = []

        def on_loan(connection: ScriptedConnection, ready: StageReady) -> StageReady:
            now = stage.now.reforming
            asked.append(None if now is None else now.way)
            if len(asked) < 3:
                raise KvrsError("it is lost")
            return ready

        hosts.on_loan = on_loan
        await borrowed(stage)
        assert asked == [Way.SUBSTITUTE, Way.WAIT, Way.WAIT]


async def test_a_donor_that_is_lost_as_it_lends_is_a_further_loss(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the books know of the loan."""
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        loans: list[ScriptedConnection] = []

        def on_loan(connection: ScriptedConnection, ready: StageReady) -> StageReady:
            loans.append(connection)
            if len(loans) == 1:
                connection.lose()
            return ready

        hosts.on_loan = on_loan
        before = stage.losses
        await borrowed(stage)
        assert stage.connection is loans[1]  # type: ignore[comparison-overlap]
        # Of either loan the pages without memory, and the loss.
        assert stage.losses == before + 3
        assert stage.now.reforming is None


async def test_a_donor_with_other_weights_is_passed_over(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        facts = iter([(b"other", {}), (b"", {"a layer": b"other"}), (b"", {})])
        seen: list[ScriptedConnection] = []

        def on_loan(connection: ScriptedConnection, ready: StageReady) -> StageReady:
            arithmetic, hashes = next(facts)
            seen.append(connection)
            own = StageFacts(arithmetic, hashes, None)
            return msgspec.structs.replace(ready, facts=own)

        hosts.on_loan = on_loan
        await borrowed(stage)
        assert [each.error is None for each in seen] == [False, False, True]


async def test_a_donor_that_is_lost_as_it_is_copied_leaves_nothing_that_counts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage is at home, and the books know that its cells are lost."""
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        await borrowed(stage)
        donor = hosts.opened[-1]
        await written(stage, 7)
        hosts.on_write = lambda _: donor.lose() if donor.error is None else None
        hosts.of["own"].is_there.set()
        await once(lambda: stage.loan is None and stage.connection.error is None)
        assert stage.connection is hosts.opened[-1]  # type: ignore[comparison-overlap]
        assert not stage.is_whole


@pytest.mark.parametrize("deaths", [1, 3])
async def test_an_own_host_that_dies_again_and_again_leaves_the_loan(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    """Each time in the middle of the copies. The donor computes on, and the last host has all."""
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        await borrowed(stage)
        loan, losses, own = stage.loan, stage.losses, hosts.of["own"]
        expected = await written(stage, 7)
        left = deaths

        def on_write(connection: ScriptedConnection) -> None:
            nonlocal left
            assert loan is not None
            assert connection.host is own
            if not any(own.pages.values()):
                loan.touched.add(KEPT[3])  # A batch writes, and there will be another copy.
            elif left:
                left -= 1
                own.pages = dict.fromkeys(range(PAGES), "")
                assert stage.loan is loan
                connection.lose()

        hosts.on_write = on_write
        own.is_there.set()
        await once(lambda: stage.loan is None)
        assert left == 0
        assert {page: own.pages[page] for page in expected} == expected
        assert (stage.losses, stage.is_whole) == (losses, True)


async def test_an_own_host_that_is_gone_when_it_is_to_be_used_is_waited_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has come and died before anything was copied."""
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        await borrowed(stage)
        expected, own = await written(stage, 7), hosts.of["own"]
        own.is_there.set()
        await once(lambda: hosts.opened[-1].host is own)
        hosts.opened[-1].lose()
        await once(lambda: stage.loan is None)
        assert {page: own.pages[page] for page in expected} == expected


async def test_a_copy_that_is_refused_is_a_loss(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hosts live, and cells of what was to be copied are lost there: the books know of it, and
    the stage is at home without them.
    """
    async with lost(tiny_model, monkeypatch) as (stage, hosts):
        await borrowed(stage)
        await written(stage, 7)
        donor, losses = hosts.opened[-1], stage.losses

        def on_write(connection: ScriptedConnection) -> None:
            raise TransferError("cells of these pages are lost")

        hosts.on_write = on_write
        hosts.of["own"].is_there.set()
        await once(lambda: stage.loan is None)
        await once(lambda: stage.now.reforming is None)
        assert donor.error is not None
        assert (stage.losses, stage.is_whole) == (losses + 1, False)
        assert stage.connection.error is None
