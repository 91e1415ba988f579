"""A new prompt whose beginning comes from what another one has left there, as far as it comes in
time.

Exactly: the same tokens, and on every KV page the same bits, as of an instance that computes it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrs.transfer.peers import Peer, PullRequest, PullResult
from kvrs_engine.engine.requests import GenerationRun
from tests.engine.peers import P, PeerEngine, peer_engines
from tests.engine.test_engine_resume_sources import PROMPT, body, source

pytestmark = [pytest.mark.engine, pytest.mark.network]

SHARED = 6  # Pages that the two prompts begin with.
OTHER = PROMPT[: SHARED * P] + [5 + position * 11 % 400 for position in range(3 * P)]


class World:
    """A holder that has computed the first prompt, and the second one as it computes it later."""

    def __init__(self, target: PeerEngine, holder: PeerEngine, plain: PeerEngine) -> None:
        self.target, self.holder, self.plain = target, holder, plain
        self.output: list[int] = []

    async def compute(self) -> None:
        await self.holder.answer(body(PROMPT, attempt=1))
        self.output = await self.plain.answer(self.second())

    def second(self, within_s: float | None = None) -> dict[str, Any]:
        asked = [] if within_s is None else [{**source("e1", 0, 9), "within_s": within_s}]
        return body(OTHER, stream="t", attempt=1, prompt_tokens=0, sources=asked)

    async def load(self, within_s: float) -> GenerationRun:
        run = await self.target.begin(self.second(within_s))
        assert await self.target.rest_of(run) == self.output
        return run

    def assert_loaded(self, run: GenerationRun, pages: int) -> None:
        """So many pages were loaded, count as found, and the others were computed."""
        assert run.sequence.cached_tokens == pages * P
        assert self.target.positions[: len(OTHER) - pages * P] == [*range(pages * P, len(OTHER))]
        assert self.target.pages(OTHER) == self.plain.pages(OTHER)


@pytest.fixture
async def world(tiny_model: Path) -> AsyncIterator[World]:
    async with peer_engines([tiny_model] * 3) as engines:
        world = World(*engines)
        await world.compute()
        yield world


async def test_what_another_prompt_has_left_is_loaded(world: World) -> None:
    """It is not there beyond what both begin with."""
    run = await world.load(within_s=60.0)

    world.assert_loaded(run, SHARED)


async def test_a_holder_that_does_not_answer_is_not_waited_for(world: World) -> None:
    """All of the prompt is computed instead."""
    world.target.may_pull.clear()

    run = await world.load(within_s=0.05)

    world.assert_loaded(run, 0)


async def test_pages_that_came_in_time_are_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder sends three, and then the time is over."""
    puller = world.target.instance.port.puller
    whole = puller.pull

    async def stalls(
        peer: Peer, request: PullRequest, pages: Sequence[memoryview], *rest: Any
    ) -> PullResult:
        await whole(peer, replace(request, tags=request.tags[:3]), pages[:3], *rest)
        raise TimeoutError

    monkeypatch.setattr(puller, "pull", stalls)

    run = await world.load(within_s=60.0)

    world.assert_loaded(run, 3)
