"""An engine of two stages in a few lines, for tests of its users: blocks and generations are
real, tokens are arithmetic.
"""

import asyncio
from collections.abc import Sequence

from distserve_patches.jobs import Job, JobEnded, Stage, StageState
from kvrs.protocol.geometry import KvGeometry
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.scheduling.pages import PageManager

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=4, dtype_bytes=4, page_size_tokens=4)
PAGES = 32


def next_token(history: Sequence[int]) -> int:
    """The token after a history, at either stage."""
    return 4 + (sum(history) * 31 + len(history)) % 200


class FakePool(KvPool):
    def close(self) -> None:
        """It is only memory."""


class ScriptedEngine:
    """Does nothing by itself: tests drive both stages."""

    def __init__(self) -> None:
        self.states = {
            stage: StageState(stage, PageManager(0, GEOMETRY.page_size_tokens)) for stage in Stage
        }
        self.pools: dict[Stage, FakePool] = {}
        self.jobs: dict[int, Job] = {}
        self.tokens: dict[int, list[int]] = {}
        self.taken_up: dict[int, int] = {}  # How many tokens had their KV.
        self.begun: set[int] = set()
        self.too_long = 10_000
        self.room = asyncio.Event()
        self.room.set()
        self._blocks: dict[tuple[int, Stage], list[int]] = {}
        for stage in Stage:
            self.restart(stage)

    # What the server calls.

    def begin(self, job: Job) -> None:
        assert self.states[Stage.CONTEXT].alive, "it would never come to its turn"
        self.begun.add(job.id)
        self.jobs[job.id], self.tokens[job.id] = job, list(job.history)

    async def reserve(self, job: Job) -> list[int]:
        self.jobs[job.id], self.tokens[job.id] = job, list(job.history)
        await self.room.wait()
        if job.id not in self.jobs:
            raise JobEnded("aborted while it waited")
        return list(self._allocate(job, Stage.DECODING))

    def take_up(self, job: Job, kv_tokens: int) -> None:
        self.taken_up[job.id] = kv_tokens

    def blocks(self, job: Job, stage: Stage) -> list[int]:
        return list(self._blocks.get((job.id, stage), []))

    def abort(self, job: Job) -> None:
        self._free(job)
        self.jobs.pop(job.id, None)

    def stage(self, which: Stage) -> StageState:
        return self.states[which]

    def refusal(self, job: Job) -> str | None:
        return "too long" if len(job.history) > self.too_long else None

    def pool(self, which: Stage) -> FakePool:
        return self.pools[which]

    # What tests do.

    @property
    def job(self) -> Job:
        """The only one that there is."""
        (job,) = self.jobs.values()
        return job

    def prefill(self, job: Job) -> None:
        """The context stage computes the history, and emits token 0."""
        blocks = self._allocate(job, Stage.CONTEXT)
        for index, block in enumerate(blocks):
            # A page's bytes identify its history and index.
            self.pools[Stage.CONTEXT].tensor[block].fill_(
                float(sum(job.history[: 4 * (index + 1)]))
            )
        job.sink.prefilled()
        if job.id in self.jobs:
            wants_more = self._emit(job)
            self._free(job)
            if not wants_more or job.prefill_only:
                self.abort(job)

    def step(self, job: Job) -> None:
        """The decoding stage emits one more token."""
        self._allocate(job, Stage.DECODING)
        if not self._emit(job):
            self.abort(job)

    def swap(self, job: Job) -> None:
        """Out to the host and back, into other blocks."""
        held, pages = self._blocks[job.id, Stage.DECODING], self.states[Stage.DECODING].pages
        elsewhere = pages.allocate(len(held))
        assert elsewhere is not None
        pages.release(held)
        self._blocks[job.id, Stage.DECODING] = elsewhere

    def die(self, which: Stage) -> list[Job]:
        """The stage is down. Returns the jobs that were not failed yet."""
        self.states[which].alive = False
        victims = list(self.jobs.values())
        self.jobs.clear()
        return victims

    def restart(self, which: Stage) -> None:
        import torch

        state = self.states[which]
        state.pages, state.alive = PageManager(PAGES, GEOMETRY.page_size_tokens), True
        state.generation += 1
        state.worker_pids, state.workers_here, state.step_s = (
            (1000 + state.generation,),
            True,
            0.0001,
        )
        self.pools[which] = FakePool(GEOMETRY, PAGES, torch.device("cpu"))

    def _emit(self, job: Job) -> bool:
        token = next_token(self.tokens[job.id])
        self.tokens[job.id].append(token)
        return job.sink.token(token)

    def _allocate(self, job: Job, stage: Stage) -> list[int]:
        """Blocks for all tokens that the job has."""
        pages, held = self.states[stage].pages, self._blocks.setdefault((job.id, stage), [])
        more = -(-len(self.tokens[job.id]) // pages.page_size_tokens) - len(held)
        if more > 0:
            allocated = pages.allocate(more)
            assert allocated is not None
            held += allocated
        return held

    def _free(self, job: Job) -> None:
        for stage in Stage:
            self.states[stage].pages.release(self._blocks.pop((job.id, stage), []))
