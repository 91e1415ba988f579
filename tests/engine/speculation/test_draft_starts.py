"""Starts with a draft model from their beginning to full service, and those that skip it: real
processes.
"""

import os
import signal
from pathlib import Path

import pytest

from kvrs.config.file import Config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ReloadState
from kvrs_engine.engine.random_model import random_tokenizer, random_weights, write_model
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.processes import ForkedProcesses
from tests.engine.speculation.restarts import asking, instances_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("drafts"),
    pytest.mark.nightly,
]

D1 = InstanceId("d1")
PROMPT = [3 + at * 7 % 500 for at in range(40)]
TOKENS = 60
TARGET, DRAFT = "llama-3.1-70b-a100-vllm-tp4", "llama-3.1-8b-a100-vllm-tp1"
DISK_BYTES_PER_S = 30e9  # Half a second for the draft, 5 s for the model.


async def test_a_helper_is_gone_before_its_model_serves(pair: Path) -> None:
    """The way into the GPU is the state hotswap: a process that stops there is in nobody's way."""
    speculation = {"source": "draft", "draft": str(pair / "draft"), "pace": DRAFT}
    engine = {"pace": TARGET, "disk_bytes_per_s": DISK_BYTES_PER_S}
    config = instances_of(speculation, model=str(pair / "target"), engine=engine)
    with ForkedProcesses(config) as processes:
        processes.start("d0", "d1")
        processes.wait_ready("d0", "d1")
        async with asking(processes) as cluster:
            calm = await cluster.answer(PROMPT, TOKENS)
            processes.kill("d1")
            processes.start("d1")
            states = list[ReloadState]()
            while True:
                report = await cluster.until(lambda report: D1 in report.reloads)
                states.append(report.reloads[D1].state)
                if states[-1] is ReloadState.HOTSWAP and report.helper is None:
                    break
            os.kill(processes.pid("d1"), signal.SIGSTOP)
            assert await cluster.answer(PROMPT, TOKENS) == calm
            os.kill(processes.pid("d1"), signal.SIGCONT)
            processes.wait_ready("d1")
            await cluster.until(lambda report: not report.reloads)
            assert await cluster.answer(PROMPT, TOKENS, "d1") == calm
    wanted = [ReloadState.LOADING_DRAFT, ReloadState.ASSIST, ReloadState.HOTSWAP]
    assert [*dict.fromkeys(states)] == wanted


async def skipped(config: Config) -> str:
    """The reason that d1 gives as it is started again."""
    with ForkedProcesses(config) as processes:
        processes.start("d0", "d1")
        processes.wait_ready("d0", "d1")
        async with asking(processes) as cluster:
            processes.kill("d1")
            with blocked_load(processes):
                processes.start("d1")
                report = await cluster.until(
                    lambda report: D1 in report.reloads and report.reloads[D1].skipped != ""
                )
            assert report.helper is None
            assert report.reloads[D1].state is ReloadState.LOADING
    return report.reloads[D1].skipped


async def test_a_draft_with_another_vocabulary_is_refused_once(pair: Path, tmp_path: Path) -> None:
    tokenizer = random_tokenizer(1)
    write_model(tmp_path / "draft", tokenizer, random_weights(1, tokenizer, layers=1))
    speculation = {"source": "draft", "draft": str(tmp_path / "draft")}

    reason = await skipped(instances_of(speculation, model=str(pair / "target")))

    assert reason.startswith("draft: vocabulary: got "), reason


async def test_a_draft_that_no_instance_wants_is_not_loaded(pair: Path) -> None:
    """Streams do not decode at an instance that prefills."""
    speculation = {"source": "draft", "draft": str(pair / "nowhere")}
    roles = ["prefill", "both"]

    reason = await skipped(instances_of(speculation, roles=roles, model=str(pair / "target")))

    assert reason == "draft: no other instance wants drafts"
