"""A DistServe server's two instances over HTTP, in front of an engine that does what the test says."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from aiohttp.test_utils import TestClient, TestServer

from distserve_patches.core import ContextLine, DecodeCore, PrefillCore
from distserve_patches.instances import Place, ServedModel, StageInstance
from distserve_patches.jobs import Job, Stage
from kvrs.config import parse_config
from kvrs.engine.http import make_app
from kvrs.engine.requests import Model
from kvrs.engine.served import EPOCHS_PER_START
from kvrs.ids import InstanceId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.secrets import http_token
from kvrs.text.output import load_tokenizer
from kvrs.text.pieces import TokenPieces
from kvrs.transfer.faults import SendingFaults
from kvrs.transfer.http import cut_watches
from kvrs.transfer.links import SendingLinks
from tests.distserve_patches.scripted_engine import GEOMETRY, PAGES, ScriptedEngine, next_token

SECRET = b"a secret of the tests, long enough"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # Two full pages and a half.


PATIENCE_S = 20.0  # Only ends what hangs.


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class House:
    """Both instances of a server, each with a client of its HTTP side."""

    engine: ScriptedEngine
    prefill: StageInstance
    decode: StageInstance
    p: TestClient[Any, Any]
    d: TestClient[Any, Any]

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
async def house(tiny_model: Path, unused_ports: list[int]) -> AsyncIterator[House]:
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
    config = parse_config({"cluster": {"backend": "distserve", "model": str(tiny_model), "nodes": nodes}})
    tokenizer = load_tokenizer(tiny_model)
    served = Model(tokenizer, 512, frozenset({1}))
    model = ServedModel("tiny", served, TokenPieces(tokenizer), None, "fingerprint", GEOMETRY, 128)
    links, line = SendingLinks(config.transfer, SendingFaults(), config.cluster.nodes[0].id), ContextLine()
    line.prefill = table = PrefillTable("fake", "fake", 64, (0.001, 0.02))
    made = []
    for stage, kind, settings in zip(Stage, (PrefillCore, DecodeCore), config.cluster.nodes[0].instances, strict=True):
        place = Place(config, config.cluster.nodes[0], settings, SECRET, 3, links)
        core = kind(engine, line, clock=time.monotonic, lease_s=30.0)
        own_prefill = InstanceId("p0") if stage is Stage.DECODING else None
        made.append(StageInstance(place, model, core, stage, partial(engine.pool, stage), own_prefill))
        made[-1].prefill = table
    headers = {"Authorization": f"Bearer {http_token(SECRET)}"}
    apps = [make_app(instance) for instance in made]
    for instance, app in zip(made, apps, strict=True):
        instance.on_down = partial(cut_watches, app)
    async with (
        TestClient(TestServer(apps[0]), headers=headers) as p,
        TestClient(TestServer(apps[1]), headers=headers) as d,
    ):
        for instance in made:
            await instance.start()
            instance.stage_changed()
        yield House(engine, made[0], made[1], p, d)
        for instance in made:
            await instance.close()


@pytest.fixture
def unused_ports() -> list[int]:
    import socket

    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


def body(prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 6, "stream": True, "return_token_ids": True, "ignore_eos": True} | fields


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def token_ids_of(events: list[Any]) -> list[int]:
    return [token for event in events for choice in event.get("choices", []) for token in choice["token_ids"]]


def continued(history: list[int], tokens: int) -> list[int]:
    ids = list(history)
    for _ in range(tokens):
        ids.append(next_token(ids))
    return ids[len(history) :]


async def ask(client: TestClient[Any, Any], asked: dict[str, Any]) -> str:
    async with asyncio.timeout(PATIENCE_S), client.post("/v1/completions", json=asked) as answer:
        return await answer.text()


async def test_one_call_to_the_decode_instance_is_the_whole_stream(house: House) -> None:
    """The context stage says token 0, the decoding stage the others, and the first event names the prompt."""
    asking = asyncio.create_task(ask(house.d, body(PROMPT)))
    job = await house.job()
    house.engine.prefill(job)
    await house.produce(job, 5)

    text = await asking

    events = events_of(text)
    assert events[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    assert token_ids_of(events) == continued(PROMPT, 6)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert text.endswith("data: [DONE]\n\n")
    assert not house.engine.jobs


async def test_the_prompt_stays_at_the_prefill_instance_under_a_lease(house: House) -> None:
    """So it can be fetched when the decoding stage dies: full pages by tag, the partial one by the stream's name."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=kvrs)))
    job = await house.job()
    house.engine.prefill(job)
    await house.produce(job, 5)
    await asking

    pages = house.prefill.pages
    assert pages.retained_tokens("s") == len(PROMPT)  # type: ignore[arg-type]
    pages.check()
    async with house.p.post("/kvrs/v1/leases", json={"lease_s": 5, "release": ["s"]}) as answer:
        assert answer.status == 200
    assert pages.retained_tokens("s") == 0  # type: ignore[arg-type]
    assert pages.free_pages == PAGES


async def test_prefill_at_one_call_decode_at_another(house: House) -> None:
    """The plain P/D convention is served too; the partial last page comes along, so one step is all that is left to do."""
    prefill = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    prefill["kvrs"] = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(house.p, prefill))
    house.engine.prefill(await house.job())
    params = json.loads(await asking)["kv_transfer_params"]
    assert len(params["remote_block_ids"]) == 2

    asking = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=prefill["kvrs"], kv_transfer_params=params)))
    job = await house.job()
    await until(lambda: job.id in house.engine.taken_up)
    assert house.engine.taken_up[job.id] == len(PROMPT) - 1
    got = [
        house.engine.pools[Stage.DECODING].tensor[block].flatten()[0].item() for block in house.engine.blocks(job, Stage.DECODING)
    ]
    assert got == [sum(PROMPT[:4]), sum(PROMPT[:8]), sum(PROMPT)]
    await house.produce(job, 6)

    events = events_of(await asking)
    assert token_ids_of(events) == continued(PROMPT, 6)
    # The caller has been told by the prefill call.
    assert "prompt_token_ids" not in events[0]["choices"][0]


async def test_a_page_that_the_next_step_writes_is_found_only_behind_it(house: House) -> None:
    """The last known token is computed again, into a page that came whole: no peer may be sent it meanwhile."""
    prompt = PROMPT[:8]
    prefill: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    prefill["kvrs"] = {"stream": "s", "attempt": 1, "prompt_tokens": len(prompt)}
    asking = asyncio.create_task(ask(house.p, prefill))
    house.engine.prefill(await house.job())
    params = json.loads(await asking)["kv_transfer_params"]
    asking = asyncio.create_task(ask(house.d, body(prompt, kvrs=prefill["kvrs"], kv_transfer_params=params)))
    job = await house.job()
    await until(lambda: job.id in house.engine.taken_up)
    assert house.engine.taken_up[job.id] == len(prompt) - 1
    tags = next(iter(house.decode.core.works)).tags[:2]

    before = house.decode.pages.match(tags)
    await house.produce(job, 1)
    behind = house.decode.pages.match(tags)

    assert before == house.engine.blocks(job, Stage.DECODING)[:1]
    assert behind == house.engine.blocks(job, Stage.DECODING)[:2]
    asking.cancel()


async def resumed(house: House, generation: int | None = None) -> tuple[Job, list[int], asyncio.Task[str]]:
    """A recovery of a stream with three tokens of output, whose first page is said to be at the prefill instance."""
    history = [*PROMPT, *continued(PROMPT, 3)]
    source = {"id": "p0", "first_page": 0, "pages": 2, "generation": house.prefill.epoch if generation is None else generation}
    kvrs = {"stream": "s", "attempt": 2, "prompt_tokens": len(PROMPT), "sources": [source]}
    asking = asyncio.create_task(ask(house.d, body(history, kvrs=kvrs)))
    return await house.job(), history, asking


async def test_a_recovery_fetches_what_is_retained_and_decodes_the_rest_again(house: House) -> None:
    """Known tokens behind the fetched pages are steps; their tokens were sent already, and are not sent again."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    first = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=kvrs, max_tokens=1)))
    house.engine.prefill(await house.job())
    await first

    job, history, asking = await resumed(house)
    await until(lambda: job.id in house.engine.taken_up)
    assert house.engine.taken_up[job.id] == 8
    await house.produce(job, 3)

    events = events_of(await asking)
    assert token_ids_of(events) == continued(history, 3)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_recovery_that_finds_nothing_computes_the_history(house: House) -> None:
    """The context stage takes the whole history for a prompt, in the same attempt; the prompt is not retained as another."""
    job, history, asking = await resumed(house)
    await until(lambda: job.id in house.engine.begun)
    house.engine.prefill(job)
    await house.produce(job, 2)

    assert token_ids_of(events_of(await asking)) == continued(history, 3)


async def test_few_fetched_pages_are_left_aside_when_computing_is_quicker(house: House) -> None:
    """A peer that had less than was hoped for must not cost a step per missing token."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    first = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=kvrs, max_tokens=1)))
    house.engine.prefill(await house.job())
    await first
    house.engine.states[Stage.DECODING].step_s = 1.0

    job, _, asking = await resumed(house)
    await until(lambda: job.id in house.engine.begun)

    assert job.id not in house.engine.taken_up
    asking.cancel()


async def test_the_death_of_the_decoding_stage_ends_its_streams_and_not_the_prefill_instance(house: House) -> None:
    """Streams get an error event, the load watch ends, the port says 503; and the next life has a higher epoch."""
    watch = await house.d.get("/kvrs/v1/load?watch=0.02")
    await watch.content.readline()
    asking = asyncio.create_task(ask(house.d, body(PROMPT)))
    job = await house.job()
    house.engine.prefill(job)
    await house.produce(job, 1)
    epoch = house.decode.epoch

    victims = house.engine.die(Stage.DECODING)
    house.change(Stage.DECODING)
    for victim in victims:
        victim.sink.failed(Stage.DECODING, "worker 7 died")

    text = await asking
    assert events_of(text)[-1]["error"]["code"] == "engine_failed"
    assert "worker 7 died" in text
    with pytest.raises(ClientPayloadError):
        await asyncio.wait_for(watch.read(), PATIENCE_S)
    assert [(await client.get("/kvrs/v1/instance")).status for client in (house.p, house.d)] == [200, 503]
    house.engine.revive(Stage.DECODING)
    house.change(Stage.DECODING)
    info = await (await house.d.get("/kvrs/v1/instance")).json()
    assert info["epoch"] == epoch + 1
    assert info["own_prefill"] == "p0"
    assert info["worker_pids"] == [1002]


async def test_what_needs_the_context_stage_waits_until_it_is_back(house: House) -> None:
    """It comes back by itself; and where it was the last one there is nobody else who could compute the prompt."""
    house.engine.die(Stage.CONTEXT)
    house.change(Stage.CONTEXT)
    asking = asyncio.create_task(ask(house.d, body(PROMPT, max_tokens=1)))
    await until(lambda: house.decode.load().queued == 1)
    assert not house.engine.jobs

    house.engine.revive(Stage.CONTEXT)
    house.change(Stage.CONTEXT)

    house.engine.prefill(await house.job())
    assert token_ids_of(events_of(await asking)) == continued(PROMPT, 1)


async def test_what_waits_for_the_context_stage_dies_with_the_decoding_stage(house: House) -> None:
    """Else its client would wait for what nobody does."""
    house.engine.die(Stage.CONTEXT)
    house.change(Stage.CONTEXT)
    asking = asyncio.create_task(ask(house.d, body(PROMPT)))
    await until(lambda: house.decode.load().queued == 1)

    house.engine.die(Stage.DECODING)
    house.change(Stage.DECODING)

    assert events_of(await asking)[-1]["error"]["code"] == "engine_failed"


async def test_epochs_of_a_later_start_are_higher_than_all_before(house: House) -> None:
    """Lives of a stage and fences count within a start of the process."""
    epoch = house.decode.epoch
    async with house.d.post("/kvrs/v1/fence", json={"attempts": {"s": 4}}) as answer:
        assert (await answer.json())["epoch"] == epoch + 1

    assert 3 * EPOCHS_PER_START < epoch < 4 * EPOCHS_PER_START


async def test_a_fenced_attempt_ends_and_is_refused(house: House) -> None:
    """A stream has one writer."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT)}
    asking = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=kvrs)))
    await house.job()

    await house.d.post("/kvrs/v1/fence", json={"attempts": {"s": 2}})

    assert events_of(await asking)[-1]["error"]["code"] == "fenced"
    assert not house.engine.jobs
    async with house.d.post("/v1/completions", json=body(PROMPT, kvrs=kvrs)) as answer:
        assert answer.status == 409


@pytest.mark.parametrize(("slot_token", "ends"), [(7, True), (0, False)])
async def test_a_transfer_whose_slot_has_ended_ends(house: House, slot_token: int, ends: bool) -> None:
    """As at the embedded engine: only what runs under a slot, and the epoch stays."""
    kvrs = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPT), "slot_token": slot_token}
    asking = asyncio.create_task(ask(house.d, body(PROMPT, kvrs=kvrs)))
    await house.job()
    epoch = house.decode.epoch

    await house.d.post("/kvrs/v1/fence", json={"attempts": {"s": 2}, "slots_only": True})

    assert (not house.engine.jobs) is ends
    assert house.decode.epoch == epoch
    asking.cancel()


async def test_a_client_that_leaves_aborts_its_job(house: House) -> None:
    """DistServe itself would go on to the last token."""
    asking = asyncio.create_task(ask(house.d, body(PROMPT)))
    job = await house.job()
    house.engine.prefill(job)
    await house.produce(job, 1)

    asking.cancel()

    await until(lambda: not house.engine.jobs)
    assert house.decode.pages.free_pages == PAGES
    assert not house.decode.core.works


@pytest.mark.parametrize("waits_for", ["room", "pages"])
async def test_an_abort_while_pages_are_fetched_leaves_nothing_behind(house: House, waits_for: str) -> None:
    """Whether it waits for room or for bytes: blocks are free again, once nobody writes into them."""
    if waits_for == "room":
        house.engine.room.clear()
    job, _, asking = await resumed(house, generation=99)
    (work,) = house.decode.core.works.values()

    house.decode.core.abort(work.run)
    house.engine.room.set()

    await until(lambda: house.decode.pages.free_pages == PAGES and not house.decode.core._pulls)  # type: ignore[attr-defined]
    assert job.id not in house.engine.taken_up
    house.decode.pages.check()
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
async def test_what_distserve_cannot_do_is_refused_by_name(house: House, fields: dict[str, Any], param: str) -> None:
    """It decodes greedily and knows nothing else; what is not said is taken for that."""
    async with house.d.post("/v1/completions", json=body(PROMPT) | fields) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
    assert not house.engine.jobs


async def test_what_could_never_be_served_is_refused(house: House) -> None:
    """Upstream would let it stand at the head of its line for ever."""
    house.engine.too_long = 5

    async with house.d.post("/v1/completions", json=body(PROMPT)) as answer:
        assert answer.status == 400
        assert "too long" in await answer.text()
    assert not house.decode.core.works


async def test_full_pages_can_be_found_while_their_stream_goes_on(house: House) -> None:
    """So that agents can hold them, and peers fetch them: after a swap they lie elsewhere, and are found there."""
    asking = asyncio.create_task(ask(house.d, body(PROMPT, max_tokens=20)))
    job = await house.job()
    (work,) = house.decode.core.works.values()
    house.engine.prefill(job)
    await house.produce(job, 4)

    house.engine.swap(job)
    assert house.decode.pages.allocate(PAGES - 4) is not None  # Whatever was left behind is gone.
    await house.produce(job, 2)

    found = house.decode.pages.match(work.run.sequence.tags)
    assert found == house.engine.blocks(job, Stage.DECODING)[:4]
    asking.cancel()
