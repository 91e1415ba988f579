"""The engine's checkpointer over a stage whose ranks have parts of the pages."""

import pytest
import torch
from ray.exceptions import RayActorError

from kvrs.config.backup import BackupSettings
from kvrs.protocol.geometry import KvGeometry
from kvrs.transfer import checkpoint_sender
from kvrs_engine.engine.checkpoints import Checkpointer
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.scheduling import sequences
from tests.distserve_patches.ranks import Stage
from tests.engine.test_checkpoints import AGENTS, GEOMETRY, World, eventually, working

PAGES = 64


class StageWorld(World):
    """A world whose steps write to the caches of two ranks, each with half of the layers."""

    def __init__(self, max_pages: int = 64) -> None:
        super().__init__(PAGES)
        geometry = KvGeometry(
            layers=2,
            kv_heads=1,
            head_dim=1,
            dtype_bytes=4,
            page_size_tokens=GEOMETRY.page_size_tokens,
        )
        assert geometry.page_bytes == GEOMETRY.page_bytes
        self.pool = KvPool(geometry, PAGES, torch.device("cpu"))
        self.stage = Stage(geometry, PAGES, pipeline_size=2, max_pages=max_pages)
        settings = BackupSettings()
        self.checkpointer = Checkpointer(
            self.pages,
            self.stage.pool,
            self.agents,
            AGENTS,
            settings,
            clock=self.now_s,
            released=self._count,
        )

    def fill(self, sequence: sequences.Sequence, pages: int) -> None:
        super().fill(sequence, pages)
        self.stage.fill(self.pool)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_sender, "RETRY_S", 0.01)


async def test_pages_of_all_ranks_arrive_whole() -> None:
    world = StageWorld()
    async with working(world):
        sequence = world.begin("s")
        for _ in range(4):
            world.fill(sequence, 5)
        await world.settled()

        world.assert_held(sequence, 20)
        assert world.stage.pool.slots.in_use == 0


@pytest.mark.parametrize("how", ["dead", "full"])
async def test_pages_that_cannot_be_got_are_let_go_and_sent_later(how: str) -> None:
    """The background goes on, whether the workers die or others have staged so much that there is
    no room.
    """
    world = StageWorld(max_pages=8)
    async with working(world):
        taken = world.stage.pool.slots.take(8) if how == "full" else []
        world.stage.failure = RayActorError() if how == "dead" else None
        sequence = world.begin("s")
        world.fill(sequence, 3)
        await eventually(lambda: world.released > 3)
        assert world.checkpointer.lag_pages == 3

        world.stage.pool.slots.give_back(taken)
        world.stage.failure = None
        await world.settled()

        world.assert_held(sequence, 3)
