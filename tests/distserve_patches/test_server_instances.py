"""A DistServe server's two instances over HTTP, in front of an engine that the test
drives.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import ClientPayloadError

from distserve_patches.core import DecodeCore, PrefillCore, PrefillQueue
from distserve_patches.instances import StageInstance
from distserve_patches.jobs import Job, Stage
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs.text.output import TokenPieces, load_tokenizer
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs_engine.engine.page_port import InstancePlace
from kvrs_engine.engine.requests import Vocabulary
from kvrs_engine.engine.routes import make_routes
from kvrs_engine.engine.served import ServedModel
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import instance_client
from tests.distserve_patches.scripted_engine import GEOMETRY, PAGES, ScriptedEngine, next_token

pytestmark = pytest.mark.network

SECRET = b"a secret of the tests, long enough"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # Two full pages and a half.


PATIENCE_S = 20.0  # Only ends what hangs.


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class InstancePair:
    """Both instances of a server, each with a client of its HTTP side."""

    engine: ScriptedEngine
    prefill: StageInstance
    decode: StageInstance
    p: aiohttp.ClientSession
    d: aiohttp.ClientSession

    async def job(self) -> Job:
        """The one that a request has made by now, or will in a moment."""
        await until(lambda: bool(self.engine.jobs))
        return self.engine.job

    async def produce(self, job: Job, tokens: int) -> None:
        for _ in range(tokens):
            self.engine.step(job)
            await asyncio.sleep(0)

    def change(self, stage: Stage) -> None:
        instance = self.prefill if stage is Stage.CONTEXT else self.decode
        instance.stage_changed()
        assert isinstance(self.decode.core, DecodeCore)
        self.decode.core.stage_changed(stage, alive=self.engine.states[stage].alive)


@pytest.fixture
async def pair(tiny_model: Path, unused_ports: list[int]) -> AsyncIterator[InstancePair]:
    engine = ScriptedEngine()
    ports = iter(unused_ports)
    nodes = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill", "page_port": next(ports)},
                {"id": "d0", "role": "decode", "page_port": next(ports)},
            ],
        }
    ]
    config = parse_config(
        {"cluster": {"backend": "distserve", "model": str(tiny_model), "nodes": nodes}}
    )
    tokenizer = load_tokenizer(tiny_model)
    vocabulary = Vocabulary(tokenizer, 512, frozenset({1}))
    model = ServedModel(
        "tiny", vocabulary, TokenPieces(tokenizer), None, "fingerprint", GEOMETRY, 128
    )
    links = SendingLinks(config.transfer, SendingFaults(), config.cluster.nodes[0].id)
    queue = PrefillQueue()
    queue.prefill = table = PrefillTable("fake", "fake", 64, (0.001, 0.02))
    made = []
    for stage, kind, settings in zip(
        Stage, (PrefillCore, DecodeCore), config.cluster.nodes[0].instances, strict=True
    ):
        epoch = 3 * EPOCHS_PER_START
        place = InstancePlace(config, config.cluster.nodes[0], settings, SECRET, epoch, links)
        core = kind(cast(Any, engine), queue, clock=time.monotonic, lease_s=30.0)
        own_prefill = InstanceId("p0") if stage is Stage.DECODING else None
        made.append(StageInstance(place, model, core, stage, own_prefill))
        made[-1].prefill = table
    routes = [make_routes(instance) for instance in made]
    for instance, each in zip(made, routes, strict=True):
        instance.on_down = each.cut_watches
    async with (
        instance_client(routes[0], SECRET, "p0") as p,
        instance_client(routes[1], SECRET, "d0") as d,
    ):
        for instance in made:
            await instance.start()
            instance.stage_changed()
        yield InstancePair(engine, made[0], made[1], p, d)
        for instance in made:
            await instance.close()


@pytest.fixture
def unused_ports() -> list[int]:
    return free_ports(2)


def body(prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": 6,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    } | fields


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def token_ids_of(events: list[Any]) -> list[int]:
    return [
        token
        for event in events
        for choice in event.get("choices", [])
        for token in choice["token_ids"]
    ]


def continued(history: list[int], tokens: int) -> list[int]:
    ids = list(history)
    for _ in range(tokens):
        ids.append(next_token(ids))
    return ids[len(history) :]


async def ask(client: aiohttp.ClientSession, asked: dict[str, Any]) -> str:
    async with asyncio.timeout(PATIENCE_S), client.post("/v1/completions", json=asked) as answer:
        return await answer.text()


async def test_one_call_to_the_decode_instance_is_the_whole_stream(pair: InstancePair) -> None:
    """The context stage emits token 0, the decoding stage the others, and the first event names the
    prompt.
    """
    asking = asyncio.create_task(ask(pair.d, body(PROMPT)))
    job = await pair.job()
    pair.engine.prefill(job)
    await pair.produce(job, 5)

    text = await asking

    events = events_of(text)
    assert events[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    assert token_ids_of(events) == continued(PROMPT, 6)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert text.endswith("data: [DONE]\n\n")
    assert not pair.engine.jobs


async def test_the_prompt_stays_at_the_prefill_instance_under_a_lease(pair: InstancePair) -> None:
    """So it can be fetched when the decoding stage dies: full pages by tag, the partial one by the
    stream's name.
    """
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(pair.d, body(PROMPT, kvrs=kvrs)))
    job = await pair.job()
    pair.engine.prefill(job)
    await pair.produce(job, 5)
    await asking

    pages = pair.prefill.pages
    assert pages.retained_tokens("s") == len(PROMPT)  # type: ignore[arg-type]
    pages.check()
    async with pair.p.post("/kvrs/v1/leases", json={"lease_s": 5, "release": ["s"]}) as answer:
        assert answer.status == 200
    assert pages.retained_tokens("s") == 0  # type: ignore[arg-type]
    assert pages.free_pages == PAGES


async def test_prefill_at_one_call_decode_at_another(pair: InstancePair) -> None:
    """The plain P/D convention is served too; the partial last page comes along, so one step is all
    that is left to do.
    """
    prefill = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    prefill["kvrs"] = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(pair.p, prefill))
    pair.engine.prefill(await pair.job())
    params = json.loads(await asking)["kv_transfer_params"]
    assert len(params["remote_block_ids"]) == 2

    asking = asyncio.create_task(
        ask(pair.d, body(PROMPT, kvrs=prefill["kvrs"], kv_transfer_params=params))
    )
    job = await pair.job()
    await until(lambda: job.id in pair.engine.taken_up)
    assert pair.engine.taken_up[job.id] == len(PROMPT) - 1
    got = [
        pair.engine.pools[Stage.DECODING].tensor[block].flatten()[0].item()
        for block in pair.engine.blocks(job, Stage.DECODING)
    ]
    assert got == [sum(PROMPT[:4]), sum(PROMPT[:8]), sum(PROMPT)]
    await pair.produce(job, 6)

    events = events_of(await asking)
    assert token_ids_of(events) == continued(PROMPT, 6)
    # The caller has them from the prefill call.
    assert "prompt_token_ids" not in events[0]["choices"][0]


async def test_a_page_that_the_next_step_writes_is_found_only_behind_it(pair: InstancePair) -> None:
    """The last known token is computed again, into a page that came whole: no peer may be sent it
    meanwhile.
    """
    prompt = PROMPT[:8]
    prefill: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    prefill["kvrs"] = {"stream": "s", "attempt": 1, "prompt_tokens": len(prompt)}
    asking = asyncio.create_task(ask(pair.p, prefill))
    pair.engine.prefill(await pair.job())
    params = json.loads(await asking)["kv_transfer_params"]
    asking = asyncio.create_task(
        ask(pair.d, body(prompt, kvrs=prefill["kvrs"], kv_transfer_params=params))
    )
    job = await pair.job()
    await until(lambda: job.id in pair.engine.taken_up)
    assert pair.engine.taken_up[job.id] == len(prompt) - 1
    tags = next(iter(pair.decode.core.job_runs)).tags[:2]

    before = pair.decode.pages.match(tags)
    await pair.produce(job, 1)
    behind = pair.decode.pages.match(tags)

    assert before == pair.engine.blocks(job, Stage.DECODING)[:1]
    assert behind == pair.engine.blocks(job, Stage.DECODING)[:2]
    asking.cancel()


async def resumed(
    pair: InstancePair, generation: int | None = None
) -> tuple[Job, list[int], asyncio.Task[str]]:
    """A recovery of a stream with three tokens of output, whose first page should be at the
    prefill instance.
    """
    history = [*PROMPT, *continued(PROMPT, 3)]
    source = {
        "id": "p0",
        "first_page": 0,
        "pages": 2,
        "generation": pair.prefill.epoch if generation is None else generation,
    }
    kvrs = {"stream": "s", "attempt": 2, "prompt_tokens": len(PROMPT), "sources": [source]}
    asking = asyncio.create_task(ask(pair.d, body(history, kvrs=kvrs)))
    return await pair.job(), history, asking


async def test_a_recovery_fetches_what_is_retained_and_decodes_the_rest_again(
    pair: InstancePair,
) -> None:
    """Known tokens behind the fetched pages are steps; their tokens were sent already, and are not
    sent again.
    """
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    first = asyncio.create_task(ask(pair.d, body(PROMPT, kvrs=kvrs, max_tokens=1)))
    pair.engine.prefill(await pair.job())
    await first

    job, history, asking = await resumed(pair)
    await until(lambda: job.id in pair.engine.taken_up)
    assert pair.engine.taken_up[job.id] == 8
    await pair.produce(job, 3)

    events = events_of(await asking)
    assert token_ids_of(events) == continued(history, 3)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_recovery_that_finds_nothing_computes_the_history(pair: InstancePair) -> None:
    """The context stage takes the whole history for a prompt, in the same attempt; the prompt is
    not retained as another.
    """
    job, history, asking = await resumed(pair)
    await until(lambda: job.id in pair.engine.begun)
    pair.engine.prefill(job)
    await pair.produce(job, 2)

    assert token_ids_of(events_of(await asking)) == continued(history, 3)


async def test_few_fetched_pages_are_left_aside_when_computing_is_quicker(
    pair: InstancePair,
) -> None:
    """A peer that had less than announced must not cost a step per missing token."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    first = asyncio.create_task(ask(pair.d, body(PROMPT, kvrs=kvrs, max_tokens=1)))
    pair.engine.prefill(await pair.job())
    await first
    pair.engine.states[Stage.DECODING].step_s = 1.0

    job, _, asking = await resumed(pair)
    await until(lambda: job.id in pair.engine.begun)

    assert job.id not in pair.engine.taken_up
    asking.cancel()


async def test_the_death_of_the_decoding_stage_ends_its_streams_and_not_the_prefill_instance(
    pair: InstancePair,
) -> None:
    """Streams get an error event, the load watch ends, the port answers 503; and the next
    generation has a higher epoch.
    """
    watch = await pair.d.get("/kvrs/v1/load?watch=0.02")
    await watch.content.readline()
    asking = asyncio.create_task(ask(pair.d, body(PROMPT)))
    job = await pair.job()
    pair.engine.prefill(job)
    await pair.produce(job, 1)
    epoch = pair.decode.epoch

    victims = pair.engine.die(Stage.DECODING)
    pair.engine.states[Stage.DECODING].death = "worker 7 died"
    pair.change(Stage.DECODING)
    for victim in victims:
        victim.sink.failed(Stage.DECODING, "worker 7 died")

    text = await asking
    assert events_of(text)[-1]["error"]["code"] == "engine_failed"
    assert "worker 7 died" in text
    with pytest.raises(ClientPayloadError):
        await asyncio.wait_for(watch.read(), PATIENCE_S)
    assert [(await client.get("/kvrs/v1/instance")).status for client in (pair.p, pair.d)] == [
        200,
        503,
    ]
    assert "worker 7 died" in await (await pair.d.get("/kvrs/v1/instance")).text()
    pair.engine.restart(Stage.DECODING)
    pair.change(Stage.DECODING)
    info = await (await pair.d.get("/kvrs/v1/instance")).json()
    assert info["epoch"] == epoch + 1
    assert info["own_prefill"] == "p0"
    assert info["worker_pids"] == [1002]


async def test_what_needs_the_context_stage_waits_until_it_is_back(pair: InstancePair) -> None:
    """It comes back by itself; and where it was the last one there is no other that could compute
    the prompt.
    """
    pair.engine.die(Stage.CONTEXT)
    pair.change(Stage.CONTEXT)
    asking = asyncio.create_task(ask(pair.d, body(PROMPT, max_tokens=1)))
    await until(lambda: pair.decode.load().queued == 1)
    assert not pair.engine.jobs

    pair.engine.restart(Stage.CONTEXT)
    pair.change(Stage.CONTEXT)

    pair.engine.prefill(await pair.job())
    assert token_ids_of(events_of(await asking)) == continued(PROMPT, 1)


async def test_what_waits_for_the_context_stage_dies_with_the_decoding_stage(
    pair: InstancePair,
) -> None:
    """Else its client would wait for ever."""
    pair.engine.die(Stage.CONTEXT)
    pair.change(Stage.CONTEXT)
    asking = asyncio.create_task(ask(pair.d, body(PROMPT)))
    await until(lambda: pair.decode.load().queued == 1)

    pair.engine.die(Stage.DECODING)
    pair.change(Stage.DECODING)

    assert events_of(await asking)[-1]["error"]["code"] == "engine_failed"


async def test_a_full_stage_tells_how_long_one_more_would_wait(pair: InstancePair) -> None:
    """By the time between two ends, whatever the jobs that wait came by: a hand-off is weighed by
    that.
    """
    state = pair.engine.states[Stage.DECODING]
    state.queued = 3
    assert pair.decode.load().queue_delay_s == 0

    state.full = True
    pair.decode.load()
    await until(lambda: pair.decode.load().queue_delay_s > 0)

    state.full = False
    assert pair.decode.load().queue_delay_s == 0


async def test_epochs_of_a_later_start_are_higher_than_all_before(pair: InstancePair) -> None:
    """Restarts of a stage and fences count within a start of the process."""
    epoch = pair.decode.epoch
    async with pair.d.post("/kvrs/v1/fence", json={"attempts": {"s": 4}}) as answer:
        assert (await answer.json())["epoch"] == epoch + 1

    assert 3 * EPOCHS_PER_START < epoch < 4 * EPOCHS_PER_START


async def test_a_fenced_attempt_ends_and_is_refused(pair: InstancePair) -> None:
    """A stream has one writer."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(pair.d, body(PROMPT, kvrs=kvrs)))
    await pair.job()

    await pair.d.post("/kvrs/v1/fence", json={"attempts": {"s": 2}})

    assert events_of(await asking)[-1]["error"]["code"] == "fenced"
    assert not pair.engine.jobs
    async with pair.d.post("/v1/completions", json=body(PROMPT, kvrs=kvrs)) as answer:
        assert answer.status == 409


@pytest.mark.parametrize(("slot_token", "ends"), [(7, True), (0, False)])
async def test_a_transfer_whose_slot_has_ended_ends(
    pair: InstancePair, slot_token: int, ends: bool
) -> None:
    """Only transfers under the ended slot end, as at the embedded engine; the epoch stays."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT), "slot_token": slot_token}
    asking = asyncio.create_task(ask(pair.d, body(PROMPT, kvrs=kvrs)))
    await pair.job()
    epoch = pair.decode.epoch

    await pair.d.post("/kvrs/v1/fence", json={"attempts": {"s": 2}, "slots_only": True})

    assert (not pair.engine.jobs) is ends
    assert pair.decode.epoch == epoch
    asking.cancel()


async def test_a_client_that_leaves_aborts_its_job(pair: InstancePair) -> None:
    """DistServe itself would go on to the last token."""
    asking = asyncio.create_task(ask(pair.d, body(PROMPT)))
    job = await pair.job()
    pair.engine.prefill(job)
    await pair.produce(job, 1)

    asking.cancel()

    await until(lambda: not pair.engine.jobs)
    assert pair.decode.pages.free_pages == PAGES
    assert not pair.decode.core.job_runs


@pytest.mark.parametrize("waits_for", ["room", "pages"])
async def test_an_abort_while_pages_are_fetched_leaves_nothing_behind(
    pair: InstancePair, waits_for: str
) -> None:
    """A job that waits for room or for bytes frees its blocks once nothing is written to them."""
    if waits_for == "room":
        pair.engine.room.clear()
    job, _, asking = await resumed(pair, generation=99)
    (job_run,) = pair.decode.core.job_runs.values()

    pair.decode.core.abort(job_run.run)
    pair.engine.room.set()

    await until(lambda: pair.decode.pages.free_pages == PAGES and not pair.decode.core._pulls)  # type: ignore[attr-defined]
    assert job.id not in pair.engine.taken_up
    pair.decode.pages.check()
    asking.cancel()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": 1.0}, "temperature"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 2}, "n"),
        ({"min_tokens": 2, "ignore_eos": False}, "min_tokens"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
    ],
)
async def test_what_distserve_cannot_do_is_refused_by_name(
    pair: InstancePair, fields: dict[str, Any], param: str
) -> None:
    """It decodes greedily and knows nothing else; parameters that are not given mean that."""
    async with pair.d.post("/v1/completions", json=body(PROMPT) | fields) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
    assert not pair.engine.jobs


async def test_what_could_never_be_served_is_refused(pair: InstancePair) -> None:
    """Upstream would let it stand at the head of its line for ever."""
    pair.engine.too_long = 5

    async with pair.d.post("/v1/completions", json=body(PROMPT)) as answer:
        assert answer.status == 400
        assert "too long" in await answer.text()
    assert not pair.decode.core.job_runs


async def test_full_pages_can_be_found_while_their_stream_goes_on(pair: InstancePair) -> None:
    """So that agents can hold them, and peers fetch them: after a swap they lie elsewhere, and are
    found there.
    """
    asking = asyncio.create_task(ask(pair.d, body(PROMPT, max_tokens=20)))
    job = await pair.job()
    (job_run,) = pair.decode.core.job_runs.values()
    pair.engine.prefill(job)
    await pair.produce(job, 4)

    pair.engine.swap(job)
    assert pair.decode.pages.allocate(PAGES - 4) is not None  # Whatever was left behind is gone.
    await pair.produce(job, 2)

    found = pair.decode.pages.match(job_run.run.sequence.tags)
    assert found == pair.engine.blocks(job, Stage.DECODING)[:4]
    asking.cancel()
