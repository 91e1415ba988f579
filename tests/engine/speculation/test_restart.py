"""When an instance that is started again makes no drafts, and what it says of it."""

import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ReloadState
from kvrs_engine.engine.speculation.helping import DraftHelper
from kvrs_engine.engine.speculation.reload import Restart

D1 = InstanceId("d1")
SECRET = b"s" * 32


def config(tmp_path: Path, draft_bytes: int, source: str = "draft", **engine: Any) -> Config:
    for name, count in (("model", 1000), ("draft", draft_bytes)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(count))
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
    return parse_config(
        {
            "cluster": {"nodes": nodes, "model": str(tmp_path / "model"), "engine": engine},
            "speculation": {"source": source, "draft": str(tmp_path / "draft")},
        }
    )


@pytest.mark.parametrize(
    ("source", "start", "is_announced"),
    [("draft", 1, False), ("draft", 2, True), ("off", 2, False)],
)
def test_only_a_further_start_is_announced(
    tmp_path: Path, source: str, start: int, is_announced: bool
) -> None:
    restart = Restart(config(tmp_path, 10, source), D1, start, SECRET)
    restart.loaded()
    assert restart.is_announced is is_announced
    assert restart.skipped == (
        "draft: the model was loaded first" if source == "draft" and start > 1 else ""
    )


def test_a_draft_that_is_no_smaller_than_the_model_is_skipped(tmp_path: Path) -> None:
    restart = Restart(config(tmp_path, 1000, disk_bytes_per_s=1e6), D1, 2, SECRET)
    assert restart.skipped == "draft: the draft model is not smaller than the model"
    assert restart.now().state is ReloadState.LOADING
    assert restart.now().ready_in_s == pytest.approx(0.001), "it is not waited for"


def test_a_paced_draft_counts_as_its_profile(tmp_path: Path) -> None:
    """It has 8 billion weights, however large its files are."""
    large = config(tmp_path, 5000, disk_bytes_per_s=2e9, pace="llama-3.1-70b-a100-vllm-tp4")
    speculation = large.speculation.model_copy(update={"pace": "llama-3.1-8b-a100-vllm-tp1"})
    restart = Restart(large.model_copy(update={"speculation": speculation}), D1, 2, SECRET)
    assert restart.skipped == ""
    found = restart.now().ready_in_s
    assert found is not None
    assert 70 < found < 90, "140 GB and 16 GB at 2 GB/s"


@pytest.mark.network
async def test_the_log_has_a_line_for_each_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    restart = Restart(config(tmp_path, 10), D1, 2, SECRET)
    async with aiohttp.ClientSession() as http:
        await restart._tell(http, 3.0)
        await restart._tell(http, 3.0)
        restart.loaded()
        await restart._tell(http, 3.0)
    lines = [vars(record) for record in caplog.records if "state of" in record.message]
    assert [line["state"] for line in lines] == ["loading", "hotswap"]


class FullHelper(DraftHelper):
    async def run(self) -> None:
        raise RuntimeError("out of memory")


async def test_a_helper_that_fails_of_anything_is_said(tmp_path: Path) -> None:
    restart = Restart(config(tmp_path, 10), D1, 2, SECRET)
    await restart._help(object.__new__(FullHelper))
    assert restart.skipped == "draft: RuntimeError('out of memory')"
    assert restart.now().state is ReloadState.LOADING


def test_a_model_that_is_there_first_is_said(tmp_path: Path) -> None:
    restart = Restart(config(tmp_path, 10), D1, 2, SECRET)
    restart.loaded()
    assert restart.skipped == "draft: the model was loaded first"
    assert restart.now().state is ReloadState.HOTSWAP
