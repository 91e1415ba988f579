"""A stream of an instance that loses the host of a stage: real processes, and an agent."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import StreamId
from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs.protocol.pages import TrafficClass
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.routes import make_routes
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import instance_client
from tests.engine.ranks.on_nodes import D0, SECRET, hosting
from tests.engine.test_checkpoints_engine import agent, ask, cluster, eventually, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process, pytest.mark.nightly]

PROMPT, TOKENS = prompt_of(3, 100), 120


async def test_cells_of_a_lost_host_are_fetched_from_an_agent_and_the_rest_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    """In the same attempt, with the tokens of an undisturbed stream; of each page that the agent
    holds the lost stage's cells and nothing else.
    """
    async with asyncio.timeout(240), agent(tmp_path / "store") as (_, port):
        document = cluster(tiny_model, port, engine={"pages": 64, "max_model_len": 256}).model_dump(
            mode="json"
        )
        (divided,) = (
            each for each in document["cluster"]["nodes"][0]["instances"] if each["id"] == "d0"
        )
        divided |= {"pp": 2, "stage_hosts": [{"node": "n1", "port": free_ports(1)[0]}]}
        config = parse_config(document)
        with ExitStack() as hosts:
            host = hosts.enter_context(hosting(config, tmp_path))
            instance = await asyncio.to_thread(EngineInstance, config, D0, EPOCHS_PER_START, SECRET)
            async with instance_client(make_routes(instance), SECRET, D0) as client:
                await instance.start()
                try:
                    plain = await ask(client, "plain", PROMPT, TOKENS, kvrs={"checkpoints": []})
                    core = instance.core
                    core.pages.reset_cache()
                    asked = asyncio.create_task(ask(client, "s", PROMPT, TOKENS))
                    await eventually(
                        lambda: any(
                            held >= 4
                            for run in core._runs.values()
                            for held in core._held_by_agents(run).values()
                        )
                    )
                    host.kill()
                    await eventually(lambda: bool(core.missing_pages))
                    report = instance.load().reforming
                    await asyncio.to_thread(hosts.enter_context, hosting(config, tmp_path))
                    answer = await asked
                    fetched = core.fetched_pages
                    fetched_bytes = instance.port.puller.pulled_bytes[TrafficClass.RECOVERY]
                finally:
                    await instance.close()

    assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert report is not None
    assert (report.way, report.lost, report.degree) == ("wait", [1], 2)
    assert report.missing_pages[StreamId("s")] >= report.held_pages[StreamId("s")] >= 4
    assert fetched >= 4
    assert fetched_bytes == fetched * instance.worker.geometry.page_bytes // 2
