"""Weights of a draft model that the agent of a node keeps: a real agent and real instances."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import Config, parse_config
from kvrs_engine.engine.anchored import AnchoredMemory
from kvrs_engine.engine.models.reading import WeightReading
from kvrs_engine.engine.speculation.helping import DraftHelper
from kvrs_engine.engine.speculation.reload import Restart
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.agent.agents import N0, SECRET, AgentProcess
from tests.engine.anchoring import ENGINE, EngineProcess, anchored_document, ended

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.network]

PROMPT = Chunk(list(range(3, 40)), 0, range(3), logits=1)


@pytest.fixture
def written(tmp_path: Path, pair: Path) -> dict[str, Any]:
    document = anchored_document(tmp_path, pair / "target", instances=2)
    document["cluster"]["engine"]["disk_bytes_per_s"] = 1e9
    document["speculation"] = {"source": "draft", "draft": str(pair / "draft")}
    return document


@pytest.fixture
def config(tmp_path: Path, written: dict[str, Any]) -> Iterator[Config]:
    """Start the agent of a node, and return the configuration."""
    agent = AgentProcess(tmp_path, written)
    with ended(agent):
        agent.start()
        yield parse_config(written)


def waits_for_the_draft(restart: Restart, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the reading of the model begins behind that of the draft."""
    waited: list[float] = []
    monkeypatch.setattr(WeightReading, "wait", lambda _, most_s: waited.append(most_s))
    restart.reading.begin()
    return bool(waited)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_model_waits_only_for_a_draft_that_is_read(
    config: Config, pair: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Reads share the disk, and a draft in the agent's memory needs none."""
    memory = AnchoredMemory(config, N0, ENGINE, SECRET)
    if is_kept:
        memory.keep_weights(pair / "draft")
    assert memory.has_weights(pair / "draft") is is_kept
    assert not memory.has_weights(pair / "target")

    restart = Restart(config, ENGINE, 2, SECRET)

    assert waits_for_the_draft(restart, monkeypatch) is not is_kept


async def test_a_helper_takes_the_weights_that_the_agent_keeps(config: Config, pair: Path) -> None:
    """It reads nothing, and drafts what a helper would that has read them."""
    memory = AnchoredMemory(config, N0, ENGINE, SECRET)
    memory.keep_weights(pair / "draft")
    reading = WeightReading(1000, 1e9)
    async with aiohttp.ClientSession() as http:
        helper = DraftHelper(config, ENGINE, [], http, reading, memory)
        async with asyncio.timeout(60):
            worker = await helper._loaded(pair / "draft")

    assert reading._read_bytes == 0
    assert worker.anchored is None, "KV of drafts is of no use to a later process"
    own = Worker(pair / "draft", EngineSettings(pages=16))
    assert torch.equal(worker.execute([PROMPT]), own.execute([PROMPT]))


def test_an_instance_that_serves_has_its_draft_kept(
    tmp_path: Path, written: dict[str, Any], config: Config, pair: Path
) -> None:
    """From its first start on, so that the first restart finds it; also where it is the only
    process that uses it.
    """
    memory, engine = AnchoredMemory(config, N0, ENGINE, SECRET), EngineProcess(tmp_path, written)
    with ended(engine):
        engine.start(1)
        give_up_s = time.monotonic() + 60
        while not memory.has_weights(pair / "draft"):
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        process = Path(f"/proc/{engine.pid}")
        opened = {each.readlink().name for each in (process / "fd").iterdir()}
        mapped = {Path(line).name for line in (process / "maps").read_text().splitlines()}
        used = [name for name in opened | mapped if name.startswith("weights-")]
        assert len(used) == 2, "the agent would release the draft's weights"


def test_without_an_agent_a_draft_is_read(
    written: dict[str, Any], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(parse_config(written), ENGINE, 2, SECRET)
    assert waits_for_the_draft(restart, monkeypatch)
