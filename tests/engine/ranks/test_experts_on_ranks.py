"""Mixtures of experts on ranks: real processes, real SIGKILLs, whole experts and parts of them."""

import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvrs.config.cluster import ElasticSettings, Planner
from kvrs.errors import ConfigError, RanksLostError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import UnitKind
from kvrs_engine.elastic.ways import PLANNERS, Way
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.exact_models import EXPERTS, write_model
from tests.engine.ranks.test_rank_group import SETTINGS, group_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.usefixtures("patient"),
]

TOKENS = [(13 * at * at + 7) % 500 for at in range(110)]
CUTS = [0, 60, 61, 62, 90, 110]


@pytest.fixture(scope="module", params=EXPERTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "experts"
    write_model(request.param, directory, seed=5)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Tensor]:
    worker = Worker(model, SETTINGS)
    return [worker.execute([chunk]) for chunk in chunks()]


def chunks() -> Iterator[Chunk]:
    for first, last in pairwise(CUTS):
        yield Chunk(TOKENS[first:last], first, range(10, 20), logits=min(3, last - first))


def compute(group: RankGroup, expected: Sequence[Tensor]) -> None:
    """All chunks, each as often as ranks are lost in it."""
    for chunk, logits in zip(chunks(), expected, strict=True):
        while True:
            try:
                found = group.execute([chunk])
            except RanksLostError:
                group.on_lost()
            else:
                assert same_bytes(found, logits)
                break


def kill(group: RankGroup, rank: int) -> None:
    os.kill(group.pids[rank], signal.SIGKILL)


def owners(layout: Layout, layer: int) -> set[int]:
    return set(layout.mlp[layer])


@pytest.mark.parametrize(
    "ranks",
    [
        {"tp": 3},
        *(
            pytest.param(ranks, marks=pytest.mark.nightly)
            for ranks in ({"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2})
        ),
    ],
    ids=str,
)
def test_ranks_have_the_bytes_and_the_fingerprint_of_one_process(
    model: Path, expected: list[Tensor], ranks: dict[str, Any]
) -> None:
    """Evenly, unevenly, with experts of which ranks have parts, and in stages."""
    group = group_of(model, **ranks)
    try:
        assert group.fingerprint == Worker(model, SETTINGS).fingerprint
        compute(group, expected)
        assert group.reformer.done == []
    finally:
        group.close()


@pytest.mark.nightly
@pytest.mark.parametrize("planner", PLANNERS)
def test_experts_of_lost_ranks_go_to_the_others_and_back(
    model: Path, expected: list[Tensor], planner: Planner
) -> None:
    """Four ranks, three, two, and four again, in place: a survivor stays the same process, and what
    a lost process has left in memory is not read again.
    """
    group = group_of(model, ElasticSettings(planner=planner), tp=4)
    first = group.pids
    try:
        compute(group, expected)
        kill(group, 3)
        compute(group, expected)
        assert len(group.layout.ranks) >= 3
        assert owners(group.layout, 0) == set(group.layout.ranks)
        kill(group, 2)
        compute(group, expected)
        assert {0: first[0], 1: first[1]}.items() <= group.pids.items()
        while len(group.layout.ranks) < 4:
            compute(group, expected)
        compute(group, expected)

        reshards = [each for each in group.reformer.done if each.way is Way.RESHARD]
        assert reshards
        assert all(each.moved["read"] == 0 for each in group.reformer.done)
        assert sum(each.moved["kept"] for each in reshards) > 0
        assert group.pids[0] == first[0]
    finally:
        group.close()


@pytest.mark.nightly
def test_of_a_lost_device_the_experts_are_read_and_no_byte_more(
    model: Path, expected: list[Tensor]
) -> None:
    """By range out of the checkpoint, each expert's tensors on their own."""
    group = group_of(model, tp=3)
    units = ModelConfig.from_directory(model).units_of_ranks
    try:
        compute(group, expected)
        lost = [unit for unit in group.layout.held(2) if unit.kind is not UnitKind.COMMON]
        whole_experts = sum(units.bytes_of(unit) for unit in lost)
        group.lose_device(2)
        group.on_restart()
        compute(group, expected)

        reshard = group.reformer.done[0]
        assert reshard.way is Way.RESHARD
        assert reshard.moved["read"] == reshard.host_bytes == whole_experts > 0
    finally:
        group.close()


def test_a_checkpoint_without_an_expert_does_not_start(model: Path, tmp_path: Path) -> None:
    """One process names the tensor, and so do ranks."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".layers.2." in name and ".experts.4." in name)
    save_file({key: each for key, each in tensors.items() if key != name}, path)

    with pytest.raises(ConfigError, match=rf"tensor {re.escape(name)}: missing"):
        Worker(directory, SETTINGS)
    with pytest.raises(ConfigError, match=rf"tensor {re.escape(name)}: missing"):
        group_of(directory, tp=2)


def test_more_ranks_than_units_are_refused(model: Path) -> None:
    """A rank would have nothing to do; ranks without units in some layers are none of these."""
    grain = ModelConfig.from_directory(model).grain
    most = max(len(grain.mlp), len(grain.dense_mlp))

    with pytest.raises(ConfigError, match=rf"tp {most + 1}: .* allowed: 1 to {most}$"):
        group_of(model, tp=most + 1)
