"""Instances whose memory outlives them: real processes, real signals."""

import asyncio
import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.catalog import prefill_table
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import EPOCHS_PER_START, MEMORY, MeasuredPrefill
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_engine.engine.instance import EngineInstance, LoadedModel
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.agent.agents import SECRET, AgentProcess
from tests.engine.anchoring import (
    ENGINE,
    EngineProcess,
    anchored_document,
    attached,
    completion,
    ended,
    instance_of,
)
from tests.engine.peers import PeerEngine

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.network]

S, T = StreamId("s"), StreamId("t")
PROMPTS = {S: list(range(2, 102)), T: list(range(300, 340))}
MAX_TOKENS = 120


class Reference:
    """The computation of an undisturbed instance."""

    def __init__(self, model: Path) -> None:
        self.worker = Worker(model, EngineSettings(pages=64))
        self.histories = {stream: self._greedy(prompt) for stream, prompt in PROMPTS.items()}

    def _greedy(self, prompt: list[int]) -> list[int]:
        history = list(prompt)
        pages = range(-(-(len(prompt) + MAX_TOKENS) // 16))
        first = 0
        while len(history) < len(prompt) + MAX_TOKENS:
            (row,) = self.worker.execute([Chunk(history[first:], first, pages, logits=1)])
            first = len(history)
            history.append(int(torch.argmax(row)))
        return history

    def pages(self) -> dict[Tag, bytes]:
        """Every full page of the histories, computed at once."""
        found: dict[Tag, bytes] = {}
        for history in self.histories.values():
            pages = range(-(-len(history) // 16))
            self.worker.execute([Chunk(history, 0, pages, logits=0)])
            tags = page_tags(root_tag(self.worker.fingerprint), history, 16)
            found |= {
                tag: bytes(self.worker.pool.view(page))
                for tag, page in zip(tags, pages, strict=False)
            }
        return found


async def read_ids(
    client: aiohttp.ClientSession,
    body: dict[str, Any],
    count: int,
    hold: asyncio.Barrier | None = None,
) -> list[int]:
    """The first so many output ids; with `hold` the stream stays open until all have theirs, and
    the process is killed.
    """
    ids: list[int] = []
    async with client.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                ids += choice["token_ids"]
            if len(ids) >= count:
                break
        if hold is not None:
            await hold.wait()
            await hold.wait()
    return ids


async def begin_streams(engine: EngineProcess, count: int) -> dict[StreamId, list[int]]:
    """Both streams, with so many tokens each, when they go on and the process is killed."""
    hold = asyncio.Barrier(len(PROMPTS) + 1)
    async with engine.client() as client, asyncio.timeout(180):
        reading = [
            asyncio.create_task(
                read_ids(client, completion(stream, prompt, MAX_TOKENS), count, hold)
            )
            for stream, prompt in PROMPTS.items()
        ]
        await hold.wait()
        engine.end(signal.SIGKILL)
        await hold.wait()
        return dict(zip(PROMPTS, await asyncio.gather(*reading), strict=True))


async def test_a_killed_process_costs_its_streams_no_recompute(
    tmp_path: Path, dense_or_experts: Path
) -> None:
    """The agent is killed and comes back while the process serves, without effect. Then the
    process is killed: its successor finds every full page, with the bits that it would compute,
    and the streams go on as if nothing had happened.
    """
    written = anchored_document(tmp_path, dense_or_experts)
    agent, engine = AgentProcess(tmp_path, written), EngineProcess(tmp_path, written)
    with ended(agent, engine):
        agent.start()
        engine.start(1)
        agent.end(signal.SIGKILL)
        had = await begin_streams(engine, 60)
        agent.start()
        reference = Reference(dense_or_experts)
        right = reference.pages()

        async with attached(engine.config, 2) as (instance, client):
            anchored = instance.anchored
            assert anchored is not None
            assert anchored.kept.damaged == 0
            wrong = [
                page
                for page, tag in anchored.kept.pages
                if bytes(anchored.pool.view(page)) != right[tag]
            ]
            assert wrong == []
            kept = instance.info().kept
            for stream, prompt in PROMPTS.items():
                whole = reference.histories[stream]
                history = prompt + had[stream]
                assert history == whole[: len(history)]
                # The last token's KV is not there yet, and a page may be filled in part.
                assert kept[stream] >= (len(history) - 1) // 16
                body = completion(stream, prompt, MAX_TOKENS, attempt=2) | {"prompt": history}
                free = instance.pages.free_pages
                rest = await read_ids(client, body, MAX_TOKENS)
                assert history + rest == whole
                assert instance.pages.free_pages == free
            instance.pages.check()


async def test_a_process_that_was_replaced_while_it_was_stopped_ends(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Its successor has memory of its own, since the stopped one may be in the middle of a write;
    when it goes on, it writes nothing more and ends before its next batch.
    """
    written = anchored_document(tmp_path, tiny_model)
    agent, engine = AgentProcess(tmp_path, written), EngineProcess(tmp_path, written)
    with ended(agent, engine):
        agent.start()
        engine.start(1)
        async with engine.client() as client:
            await read_ids(client, completion("s", PROMPTS[S], MAX_TOKENS), 10)
            assert engine.process is not None
            engine.process.send_signal(signal.SIGSTOP)
            successor = instance_of(engine.config, 2)
            assert successor.anchored is not None
            assert successor.anchored.kept.pages == []
            engine.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(aiohttp.ClientError):
                assert await read_ids(client, completion("s2", PROMPTS[S], MAX_TOKENS), 1) == []
        assert engine.process.wait(60) == 1
        _, output = engine.end()
        assert "a later process has attached this instance's memory" in output


async def test_instances_of_a_node_share_one_copy_of_the_weights(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Each maps the same file to be read; none has it mapped to be written."""
    written = anchored_document(tmp_path, tiny_model, instances=2)
    agent = AgentProcess(tmp_path, written)
    engines = [EngineProcess(tmp_path, written, f"e{number}") for number in range(2)]
    with ended(agent, *engines):
        agent.start()
        for engine in engines:
            engine.begin(1)
        for engine in engines:
            engine.wait_ready()
        mapped = [
            {
                (line.split()[1], line.split()[4])
                for line in Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
                if "/weights-" in line
            }
            for engine in engines
        ]
        assert len(mapped[0]) == 1
        assert mapped[0] == mapped[1]
        assert {mode for mode, _ in mapped[0]} == {"r--s"}


class AwaitedDraft(WeightReading):
    def wait(self, max_s: float) -> None:
        raise AssertionError("it is waited for")


def test_weights_that_are_there_do_not_wait_for_a_draft(tmp_path: Path, tiny_model: Path) -> None:
    """With a rate of the disk a model is read after the draft; one that is attached is not read."""
    written = anchored_document(tmp_path, tiny_model)
    written["cluster"]["engine"]["disk_bytes_per_s"] = 1e9
    config, agent = parse_config(written), AgentProcess(tmp_path, written)

    def loaded(draft: WeightReading) -> WeightReading:
        reading = WeightReading(1000, 1e9, draft)
        LoadedModel.load(config, ENGINE, SECRET, reading)
        return reading

    with ended(agent):
        agent.start()
        draft = WeightReading(1000, 1e9)
        draft.end()
        loaded(draft)
        assert loaded(AwaitedDraft(1000, 1e9)).left_s() == 0.0


async def test_instances_of_a_node_copy_each_others_pages(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Full pages of a hand-off are copied from the memory of the instance that has them; only its
    last page, which has no tag, comes through a socket.
    """
    written = anchored_document(tmp_path, tiny_model, instances=2)
    agent = AgentProcess(tmp_path, written)
    body = {"prompt": PROMPTS[S], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body["kvrs"] = {"stream": "s", "attempt": 1, "prompt_tokens": len(PROMPTS[S])}
    hand_off = {
        "do_remote_prefill": True,
        "remote_engine_id": "e0",
        "remote_block_ids": ["00"] * 7,
        "remote_request_id": "s",
    }
    with ended(agent):
        agent.start()
        holder, target = (
            PeerEngine(EngineInstance(agent.config, InstanceId(name), EPOCHS_PER_START, SECRET))
            for name in ("e0", "e1")
        )
        try:
            for one in (holder, target):
                await one.instance.start()
                one.computed.clear()
            await holder.answer(body | {"kv_transfer_params": {"do_remote_decode": True}})

            token_ids = await target.answer(body | {"kv_transfer_params": hand_off})

            (brought,) = target.brought
            assert (brought.full_pages, brought.tail, brought.error) == (6, True, None)
            assert target.positions[0] == len(PROMPTS[S]) - 1
            assert target.pages(PROMPTS[S])[:6] == holder.pages(PROMPTS[S])[:6]
            assert token_ids == Reference(tiny_model).histories[S][len(PROMPTS[S]) :][:8]
            assert MEMORY in target.instance.port.puller.links()
            assert "pages are sent" not in caplog.text
        finally:
            for one in (holder, target):
                await one.instance.close()
        holder.instance.pages.check()


def test_without_an_agent_an_instance_has_memory_of_its_own(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is gone keeps no instance from starting."""
    monkeypatch.setattr("kvrs_engine.engine.anchored._AGENT_WAIT_S", 0.05)
    written = anchored_document(tmp_path, tiny_model)
    instance = instance_of(EngineProcess(tmp_path, written).config, 1)

    assert instance.anchored is None
    assert instance.info().kept == {}


def test_the_pace_of_a_long_table_is_noted(tmp_path: Path, tiny_model: Path) -> None:
    """Without a note its successor would find no pages."""
    written = anchored_document(tmp_path, tiny_model)
    written["cluster"]["engine"]["pace"] = pace = "llama-3.1-70b-h100-vllm-tp4"
    agent = AgentProcess(tmp_path, written)
    with ended(agent):
        agent.start()
        instance = instance_of(agent.config, 1)

        assert instance.anchored is not None
        note = instance.anchored.ledger.read_note()
        assert note is not None
        noted = PrefillTable.from_measured(msgspec.json.decode(note, type=MeasuredPrefill))
        tokens = (len(noted.seconds) - 1) * noted.step_tokens
        assert tokens > 1024
        assert noted.seconds[-1] == pytest.approx(prefill_table(pace).seconds_for(tokens))
