"""Pages of a stage that ranks hold in parts: as bytes they are the embedded engine's. Neither
DistServe nor Ray is needed.
"""

import asyncio
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch
from ray.exceptions import RayActorError

from distserve_patches import staging
from distserve_patches.pool import StagePool
from distserve_patches.staging import StagingSlots
from kvrs.errors import TransferError
from kvrs.ids import StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.engine.kv_pool import KvPool
from tests.distserve_patches.ranks import Stage

GEOMETRY = KvGeometry(layers=4, kv_heads=4, head_dim=8, dtype_bytes=4, page_size_tokens=4)
BLOCKS = 12
S = StreamId("s")
DEGREES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # Tensor and pipeline parallel.


def embedded_pool(geometry: KvGeometry = GEOMETRY) -> KvPool:
    """An embedded engine's pages, each with bytes of its own."""
    pool = KvPool(geometry, BLOCKS, torch.device("cpu"))
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def filled(tensor_size: int = 1, pipeline_size: int = 1) -> Stage:
    stage = Stage(GEOMETRY, BLOCKS, tensor_size, pipeline_size)
    stage.fill(embedded_pool())
    return stage


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize(("left", "right"), list(itertools.product(DEGREES, DEGREES)))
async def test_pages_go_between_all_degrees_and_stay_the_embedded_engines_bits(
    left: tuple[int, int], right: tuple[int, int], dtype_bytes: int
) -> None:
    """Out of one stage, over bytes alone into other places of another one, and only those places
    are written.
    """
    geometry = KvGeometry(
        layers=4, kv_heads=4, head_dim=8, dtype_bytes=dtype_bytes, page_size_tokens=4
    )
    embedded = embedded_pool(geometry)
    source, target = Stage(geometry, BLOCKS, *left), Stage(geometry, BLOCKS, *right)
    source.fill(embedded)

    saved = source.pool.stage([7, 2, 11])
    await saved.save()
    assert [bytes(view) for view in saved.views] == [
        bytes(embedded.view(page)) for page in (7, 2, 11)
    ]
    arrived = target.pool.stage([0, 5, 3])
    for view, sent in zip(arrived.views, saved.views, strict=True):
        view[:] = sent
    await arrived.restore(2)

    whole = target.whole().view(torch.uint8)
    assert whole[[0, 5]].equal(embedded.tensor[[7, 2]].view(torch.uint8))
    assert not whole[[1, 2, 3, 4, *range(6, BLOCKS)]].any()


async def test_a_big_transfer_goes_in_pieces_that_let_others_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And over more than one segment; all pages arrive."""
    import distserve_patches.pool as pool_module

    monkeypatch.setattr(staging, "SEGMENT_BYTES", 3 * GEOMETRY.page_bytes)
    monkeypatch.setattr(pool_module, "SEGMENT_BYTES", 2 * GEOMETRY.page_bytes)
    stage, embedded = filled(2, 2), embedded_pool()
    big, small = stage.pool.stage(range(10)), stage.pool.stage([11])

    await asyncio.gather(big.save(), small.save())

    assert [bytes(view) for view in big.views] == [bytes(embedded.view(page)) for page in range(10)]
    assert bytes(small.views[0]) == bytes(embedded.view(11))
    assert stage.calls == ["export_pages"] * 6


async def test_pages_for_two_agents_go_out_in_one_call() -> None:
    """Requests of one moment share a call to the workers, which costs more than the pages."""
    stage, embedded = filled(), embedded_pool()
    staged = [stage.pool.stage(pages) for pages in ([0, 1], [1, 2])]

    await asyncio.gather(*(each.save() for each in staged))

    assert stage.calls == ["export_pages"]
    assert [bytes(view) for each in staged for view in each.views] == [
        bytes(embedded.view(page)) for page in (0, 1, 1, 2)
    ]
    await stage.pool.stage([3]).save()
    assert stage.calls == ["export_pages", "export_pages"]


async def test_pages_are_written_only_when_nothing_is_being_swapped_out_of_them() -> None:
    """Calls that move pages pass those that wait for a step, so the one before has to be known to
    be through.
    """
    stage = filled()
    staged = stage.pool.stage([1])

    await staged.save()
    await staged.restore(1)

    assert stage.calls == ["export_pages", "swapped_out", "import_pages"]


async def test_a_dead_worker_is_a_failed_transfer() -> None:
    """The transfer fails like one whose peer dies, and its slots are free again."""
    stage = filled(2)
    stage.failure = RayActorError()
    staged = stage.pool.stage([1, 2])

    with pytest.raises(TransferError, match="worker died"):
        await staged.save()
    with pytest.raises(TransferError, match="worker died"):
        await staged.restore(2)
    staged.free()

    assert stage.pool.slots.in_use == 0


async def test_what_arrives_for_a_life_that_is_over_is_not_written_into_the_next_one() -> None:
    """A stage calls whichever workers it has now: a pull may take longer than it takes to bring new
    ones up.
    """
    stage = filled()
    staged = stage.pool.stage([1, 2])
    stage.pool.close()
    StagingSlots(GEOMETRY.page_bytes, 4)  # The next generation's, probably at the same path.

    with pytest.raises(TransferError, match="gone"):
        await staged.restore(2)
    with pytest.raises(TransferError, match="gone"):
        await staged.save()
    staged.free()

    assert "import_pages" not in stage.calls
    assert "export_pages" not in stage.calls


async def test_a_cancelled_transfer_waits_until_nothing_is_written_any_more() -> None:
    """Else slots and pages would get another owner while workers still copy into them."""
    stage, embedded = filled(2), embedded_pool()
    stage.delay_s = 0.05
    staged = stage.pool.stage([1, 2])
    saving = asyncio.create_task(staged.save())
    while not stage.calls:
        await asyncio.sleep(0)

    saving.cancel()
    await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving

    assert [bytes(view) for view in staged.views] == [bytes(embedded.view(page)) for page in (1, 2)]


def test_more_than_may_be_staged_is_refused_before_anything_is_allocated() -> None:
    """Staged pages keep their room, and there is as much as before."""
    slots = StagingSlots(page_bytes=1000, max_slots=3)
    size = os.stat(slots.file.path).st_size
    held = slots.take(2)

    with pytest.raises(TransferError, match="2 pages are to be staged where 2 of at most 3"):
        slots.take(2)
    with pytest.raises(TransferError, match="most 3"):
        slots.take(10**12)

    assert size == 0
    assert os.stat(slots.file.path).st_size == slots.file.segment_bytes
    slots.give_back(held)
    assert len(set(slots.take(3))) == 3
    slots.close()
    slots.close()


async def test_slots_are_used_again_and_never_twice_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slots are as many as are in use at once, however often pages travel."""
    monkeypatch.setattr(staging, "SEGMENT_BYTES", 2 * GEOMETRY.page_bytes)
    stage = filled()
    first, second = stage.pool.stage([0, 1]), stage.pool.stage([1, 2])
    used = set(first._slots) | set(second._slots)
    assert len(used) == 4
    first.free()
    first.free()  # Harmless.
    second.free()

    again = stage.pool.stage(range(5))

    assert used < set(again._slots)
    assert stage.pool.slots.in_use == 5
    assert os.stat(stage.pool.slots.file.path).st_size == 3 * stage.pool.slots.file.segment_bytes


async def test_a_file_that_follows_another_one_is_not_taken_for_it() -> None:
    """The system gives a descriptor's number again at once, so the second file of a server has the
    path of the first.
    """
    stage, embedded = filled(), embedded_pool()
    await stage.pool.stage([1]).save()
    stage.pool.close()

    stage.pool = StagePool(GEOMETRY, stage.call_workers, stage.swapped_out, 64)
    staged = stage.pool.stage([2])
    await staged.save()

    assert bytes(staged.views[0]) == bytes(embedded.view(2))


async def test_a_stage_of_other_pages_is_refused() -> None:
    """Before a byte is written where it does not belong; and no block beyond the last is
    touched.
    """
    stage, other = (
        filled(),
        KvGeometry(layers=2, kv_heads=4, head_dim=8, dtype_bytes=4, page_size_tokens=4),
    )
    slots = StagingSlots(other.page_bytes, 4)

    with pytest.raises(AssertionError, match="a page of this stage has"):
        stage.ranks[0].export_pages(slots.file, slots.take(1), [0])
    with pytest.raises(AssertionError, match="no block"):
        stage.ranks[0].export_pages(stage.pool.slots.file, stage.pool.slots.take(1), [BLOCKS])
    with pytest.raises(AssertionError, match="no segment"):
        stage.ranks[0].export_pages(stage.pool.slots.file, [10_000], [0])


@pytest.mark.process
def test_nothing_is_left_of_the_memory_when_its_owner_was_killed() -> None:
    """It never had a name; and a worker that has it mapped can go on without harm until it ends,
    too.
    """
    script = """
import sys, time
from distserve_patches.staging import StagingSlots
slots = StagingSlots(4096, 8)
slots.view(slots.take(1)[0])[:4] = b"kvrs"
print(slots.file.path, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        file = staging.StagingFile(server.stdout.readline().decode().strip(), 0, 4096, 8)
        mapped = file.map(0)
        assert b"kvrs" in mapped[:]
        assert os.readlink(file.path).startswith("/memfd:")

        server.send_signal(signal.SIGKILL)
        server.wait()

        assert b"kvrs" in mapped[:]
        with pytest.raises(OSError, match="No such file"):
            file.map(0)
