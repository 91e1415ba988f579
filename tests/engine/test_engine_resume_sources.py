"""A history whose KV comes from several places, or whose front is computed while its back is
fetched, continues exactly.

Exactly: the same tokens, and on every KV page the same bits, as in an undisturbed run.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.pages import page_tags
from kvrs.transfer.peers import TrafficClass
from kvrs.transfer.registry import peers_of
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.scheduling.sequences import SequencePhase
from tests.engine.peers import P, PeerEngine, peer_engines

pytestmark = [pytest.mark.engine, pytest.mark.network]

PROMPT = [3 + position * 7 % 500 for position in range(9 * P + 5)]
NEW = 3 * P  # So that pages of the output are full, too.
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.2, "top_p": 0.95, "seed": 11}
CUT = 2 * P + 3  # Output tokens that the client has, when the stream is continued elsewhere.


def body(token_ids: list[int], **kvrs: Any) -> dict[str, Any]:
    sampling = kvrs.pop("sampling", GREEDY)
    kvrs = {"stream": "s", "attempt": 2, "prompt_tokens": len(PROMPT), **kvrs}
    return {"prompt": token_ids, "max_tokens": NEW, "ignore_eos": True, **sampling, "kvrs": kvrs}


def source(holder: str, first_page: int, end_page: int, generation: int = 1) -> dict[str, Any]:
    return {
        "id": holder,
        "first_page": first_page,
        "pages": end_page - first_page,
        "generation": generation,
    }


class World:
    """A target, two holders, and the output and pages of an undisturbed run."""

    def __init__(self, engines: list[PeerEngine]) -> None:
        self.target, self.holder, self.other = engines
        self.output: list[int] = []
        self.undisturbed: list[bytes | None] = []

    async def run_undisturbed(self, sampling: dict[str, Any] = GREEDY) -> list[int]:
        """On both holders, so that each has all pages. Returns the history where the stream will be
        cut.
        """
        for engine in (self.holder, self.other):
            self.output = await engine.answer(body(PROMPT, attempt=1, sampling=sampling))
        self.undisturbed = self.other.pages(PROMPT + self.output)[: (len(PROMPT) + NEW - 1) // P]
        assert None not in self.undisturbed
        return PROMPT + self.output[:CUT]

    def assert_exact(self, rest: list[int]) -> None:
        assert rest == self.output[CUT:]
        assert self.target.pages(PROMPT + self.output)[: len(self.undisturbed)] == self.undisturbed

    def assert_computed(self, *spans: range, after: int) -> None:
        """Just these positions of the history, and then one after the other what came after it."""
        expected = [position for span in spans for position in span]
        assert self.target.positions == expected + list(range(after, len(PROMPT) + NEW - 1))


@pytest.fixture
async def world(tiny_model: Path) -> AsyncIterator[World]:
    async with peer_engines([tiny_model] * 3) as engines:
        yield World(engines)


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(SEEDED, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("split_page", [1, pytest.param(5, marks=pytest.mark.nightly), 10])
async def test_the_front_is_computed_while_the_back_is_fetched(
    world: World, split_page: int, sampling: dict[str, Any]
) -> None:
    """Front first: it is whole before a byte of the back has come. The rest is exact, and nothing
    was computed twice.
    """
    history = await world.run_undisturbed(sampling)
    world.target.may_pull.clear()

    run = await world.target.begin(
        body(history, sampling=sampling, sources=[source("e1", split_page, 11)])
    )
    await world.target.until(lambda: run.sequence.computed_tokens == split_page * P)
    assert run.sequence.phase is SequencePhase.PULLING
    world.target.may_pull.set()

    world.assert_exact(await world.target.rest_of(run))
    world.assert_computed(range(split_page * P), range(11 * P, len(history)), after=len(history))


async def test_what_lies_before_between_and_behind_sources_is_computed(world: World) -> None:
    """In any order of the list: sources are asked in the order of their pages."""
    history = await world.run_undisturbed()

    rest = await world.target.answer(
        body(history, sources=[source("e2", 7, 9), source("e1", 2, 5)])
    )

    world.assert_exact(rest)
    assert [peer for peer, _ in world.target.asked] == ["e1", "e2"]
    world.assert_computed(
        range(2 * P), range(5 * P, 7 * P), range(9 * P, len(history)), after=len(history)
    )


async def test_promised_pages_that_are_missing_are_computed(world: World) -> None:
    """No peer has them any more. What comes behind them from another source is fetched meanwhile,
    and used.
    """
    history = await world.run_undisturbed()
    world.holder.instance.pages.reset_cache()
    await world.holder.answer(body(PROMPT[: 3 * P + 1], stream="short", prompt_tokens=0))

    rest = await world.target.answer(
        body(history, sources=[source("e1", 0, 6), source("e2", 8, 10)])
    )

    world.assert_exact(rest)
    world.assert_computed(range(3 * P, 8 * P), range(10 * P, len(history)), after=len(history))


async def test_a_source_that_restarted_since_gives_nothing(world: World) -> None:
    """Its pages are of another generation; the next source is asked all the same, and the front
    computed.
    """
    history = await world.run_undisturbed()

    rest = await world.target.answer(
        body(history, sources=[source("e1", 0, 4, generation=7), source("e2", 4, 11)])
    )

    world.assert_exact(rest)
    world.assert_computed(range(4 * P), range(11 * P, len(history)), after=len(history))


async def test_recoveries_and_hand_offs_say_what_they_are(world: World) -> None:
    """On a link the one goes before the other."""
    await world.holder.answer(
        {**body(PROMPT, attempt=1), "kv_transfer_params": {"do_remote_decode": True}}
    )
    hand_off = {
        "do_remote_prefill": True,
        "remote_engine_id": "e1",
        "remote_block_ids": ["00"] * 9,
        "remote_request_id": "s",
    }

    await world.target.answer({**body(PROMPT, attempt=1), "kv_transfer_params": hand_off})
    await world.other.answer(body(PROMPT, sources=[source("e1", 3, 9)]))

    [(_, first)], [(_, second)] = world.target.asked, world.other.asked
    assert (first.traffic, first.tail_index) == (TrafficClass.HANDOFF, 9)
    assert (second.traffic, second.tail_index) == (TrafficClass.RECOVERY, None)
    assert world.target.positions[0] == len(PROMPT) - 1, "all but the last position was handed over"


@pytest.mark.parametrize("when", ["front in flight", "back on its way", "back there"])
async def test_an_aborted_split_gives_all_its_pages_back(world: World, when: str) -> None:
    """When both writers are done, whichever is last."""
    history = await world.run_undisturbed()
    pages = world.target.instance.pages
    if when != "back there":
        world.target.may_pull.clear()
    if when != "back on its way":
        world.target.may_compute.clear()
    run = await world.target.begin(body(history, sources=[source("e1", 4, 11)]))
    await world.target.until(
        lambda: {
            "front in flight": bool(world.target.computed),
            "back on its way": run.sequence.phase is SequencePhase.PULLING,
            "back there": bool(run.sequence.arrived),
        }[when]
    )

    world.target.instance.core.abort(run)

    assert pages.free_pages < pages.pages
    world.target.may_compute.set()
    world.target.may_pull.set()
    await world.target.until(lambda: pages.free_pages == pages.pages)
    pages.check()
    world.target.instance.core.scheduler.check()
    world.assert_exact(
        await world.target.answer(body(history, attempt=3, sources=[source("e2", 0, 11)]))
    )


async def test_a_bug_in_a_pull_ends_the_engine(world: World) -> None:
    """Else its stream would wait for ever in an instance that looks alive."""

    async def pull(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    world.target.instance.port.puller.pull = pull  # type: ignore[method-assign]

    await world.target.begin(body(PROMPT, sources=[source("e1", 0, 4)]))
    await world.target.until(lambda: world.target.instance.failed() is not None)

    assert isinstance(world.target.instance.failed(), ZeroDivisionError)


async def test_streams_beside_a_split_are_not_disturbed(world: World) -> None:
    """Many at once, split at all kinds of pages, in one engine: each has the output that it would
    have had alone.
    """
    history = await world.run_undisturbed()

    answers = await asyncio.gather(
        *(
            world.target.answer(
                body(
                    history,
                    stream=f"s{page}",
                    sources=[source("e1", page, 11), source("e2", 10, 11)],
                )
            )
            for page in range(11)
        )
    )

    assert answers == [world.output[CUT:]] * 11
    world.assert_exact(answers[0])


def test_agents_are_peers_where_there_are_any() -> None:
    """By their ids, with their page ports; without checkpoints in the configuration there are no
    them.
    """
    node = {
        "id": "n0",
        "instances": [{"id": "e0", "role": "both"}],
        "agent": {"host": "::1", "page_port": 7},
    }
    config = parse_config({"cluster": {"nodes": [node]}, "backup": {"mode": "local"}})

    without = parse_config({"cluster": {"nodes": [node]}})

    agent = peers_of(config, config.cluster.nodes[0], b"secret")[InstanceId("agent-n0")]

    assert (agent.instance, agent.node, agent.host, agent.port) == ("agent-n0", "n0", "::1", 7)
    assert list(peers_of(without, without.cluster.nodes[0], b"secret")) == ["e0"]


async def test_an_unknown_source_is_refused(tiny_model: Path) -> None:
    """With its name and those that are known: a request never brings an address."""
    async with peer_engines([tiny_model]) as [engine]:
        with pytest.raises(RequestError, match="'agent-n0' is not in the registry; allowed: e0"):
            await engine.begin(body(PROMPT, sources=[source("agent-n0", 0, 1)]))


async def test_the_queue_delay_tells_of_the_wait_for_a_place(tiny_model: Path) -> None:
    """Two that run fill an engine; the next one waits as long as a departure has taken
    already, and those behind it for as many places as there are.
    """
    async with peer_engines([tiny_model], max_running=2) as [engine]:
        core, now_s = engine.instance.core, [100.0]
        core._clock = lambda: now_s[0]
        engine.may_compute.clear()
        prompts = [[index + 3, *PROMPT[1:]] for index in range(4)]  # Nothing of one is another's.
        runs = [
            await engine.begin(body(prompt, stream=f"s{index}"))
            for index, prompt in enumerate(prompts)
        ]
        await engine.until(lambda: core.scheduler.waiting == 2)
        compute_s = core.queue_delay_s()

        now_s[0] += 7.0

        each_s, overhead_s = core.prefill.extra(0, len(PROMPT)), core.prefill.step_overhead_s
        steps = -(-4 * len(PROMPT) // engine.instance.worker.settings.max_batch_tokens)
        assert compute_s == pytest.approx(steps * overhead_s + 4 * (each_s - overhead_s))
        assert compute_s > 0
        assert core.queue_delay_s() == pytest.approx(max(compute_s, 7.0 + 2 * 7.0 / 2))
        engine.may_compute.set()
        for run in runs:
            await engine.rest_of(run)
        await engine.until(lambda: not core.scheduler.full)
        assert core.queue_delay_s() == 0.0


class Recorder(StepHook):
    """Records what a checkpointer is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def began(self, run: Any) -> None:
        self.calls.append(("began", run.sequence.computed_tokens // P))

    def filled(self, run: Any) -> None:
        assert len(run.sequence.pages) * P >= run.sequence.computed_tokens
        self.calls.append(("filled", run.sequence.computed_tokens // P))

    def ended(self, run: Any) -> None:
        assert run.sequence.phase is SequencePhase.FINISHED
        self.calls.append(("ended", run.sequence.computed_tokens // P))


async def test_who_sends_checkpoints_hears_of_full_pages_and_of_nothing_else(world: World) -> None:
    """Once per batch or arrival that fills some, computed or fetched."""
    history = await world.run_undisturbed()
    recorder = Recorder()
    world.target.instance.core.hooks.append(recorder)
    world.target.instance.pages.reset_cache()
    world.target.may_pull.clear()
    checkpoints = [{"agent": "agent-n9", "reserved_bytes": 1}]

    run = await world.target.begin(
        body(history, sources=[source("e1", 3, 11)], checkpoints=checkpoints)
    )
    await world.target.until(lambda: run.sequence.phase is SequencePhase.PULLING)
    world.target.may_pull.set()
    await world.target.rest_of(run)

    await world.target.answer(body(history, stream="found here", checkpoints=checkpoints))

    filled_in_the_end = (len(PROMPT) + NEW - 1) // P
    assert filled_in_the_end == 12
    assert recorder.calls == [
        *[("began", 0), ("filled", 3), ("filled", 11), ("filled", 12), ("ended", 12)],
        *[("began", 0), ("filled", 11), ("filled", 12), ("ended", 12)],
    ]


def poison(engine: PeerEngine, history: list[int]) -> None:
    """Its third page is no numbers there."""
    manager, pool = engine.instance.pages, engine.instance.worker.pool
    assert isinstance(pool, KvPool), "one process"
    held = manager.match(page_tags(engine.instance.root(""), history, P)[:3])
    pool.tensor[held[-1]].fill_(math.nan)
    manager.release(held)


async def test_under_another_salt_no_page_of_before_is_found(world: World) -> None:
    """Neither the poisoned one in the engine's own cache, which spoils an attempt without the salt,
    nor one that a holder is said to have.
    """
    history = await world.run_undisturbed()
    poison(world.holder, history)
    asked = body(history, attempt=3, sources=[source("e2", 0, 11)])

    again = await world.holder.begin(asked | {"cache_salt": "s/2"})
    found = await world.holder.rest_of(again)
    spoilt = await world.holder.begin(body(history, attempt=4))
    lost = await world.holder.rest_of(spoilt)

    assert found == world.output[CUT:]
    assert again.fetched_pages == again.sequence.cached_tokens == 0
    assert (lost, spoilt.failure_code) == ([], "not_a_number")


async def test_a_poisoned_page_spoils_the_attempt_that_fetches_it_and_none_behind(
    world: World,
) -> None:
    """The holder's page is no numbers, and arrives as it was sent. The attempt that fetches nothing
    computes the history anew, at the same target too.
    """
    history = await world.run_undisturbed()
    poison(world.holder, history)

    spoilt = await world.target.begin(body(history, sources=[source("e1", 0, 11)]))
    lost = await world.target.rest_of(spoilt)
    again = await world.target.answer(body(history, attempt=3))

    assert lost == []
    assert spoilt.failure_code == "not_a_number"
    assert again == world.output[CUT:]
    assert world.target.pages(PROMPT + world.output)[: len(world.undisturbed)] == world.undisturbed
