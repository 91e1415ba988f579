"""Generated mixtures of experts are reproducible, worth decoding, and as skewed as asked for."""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs.text.output import load_tokenizer
from kvrs_engine.engine.layers.experts import Router, Routing
from kvrs_engine.engine.layers.units import Form
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit import random_experts
from kvrs_testkit.random_experts import FAMILIES, ExpertsModel, write_experts_model

pytestmark = pytest.mark.engine


def popularity(
    directory: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, list[int]]]:
    """How often random tokens choose each expert of each layer: the largest count over the mean,
    and all of them.
    """
    worker = Worker(directory, EngineSettings(pages=64))
    routings: list[Tensor] = []
    route = Router.__call__

    def noted(self: Router, hidden: Tensor, form: Form) -> Routing:
        found = route(self, hidden, form)
        routings.append(torch.bincount(found.experts[:rows].flatten(), minlength=8))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Router, "__call__", noted)
        ids = random.Random(1).choices(range(worker.vocab_size), k=rows)
        worker.execute([Chunk(ids, 0, range(64), logits=0)])
    return [(float(each.max() / each.float().mean()), each.tolist()) for each in routings]


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every engine of a test may generate the model on its own."""
    one, other, seeded = (tmp_path / name for name in ("one", "other", "seeded"))
    for directory, seed in ((one, 0), (other, 0), (seeded, 1)):
        write_experts_model(directory, ExpertsModel.tiny("mixtral", experts=4), seed)

    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    weights = "model.safetensors"
    assert (one / weights).read_bytes() != (seeded / weights).read_bytes()


def test_another_model_in_the_directory_is_refused(tmp_path: Path) -> None:
    """It would be taken for the one that was asked for."""
    write_experts_model(tmp_path / "model", ExpertsModel.tiny("mixtral", skew=1.0), 0)
    write_experts_model(tmp_path / "model", ExpertsModel.tiny("mixtral", skew=1.0), 0)

    for model, seed in (
        (ExpertsModel.tiny("mixtral", skew=0.5), 0),
        (ExpertsModel.tiny("mixtral", skew=1.0), 1),
        (ExpertsModel.tiny("qwen3_moe", skew=1.0), 0),
    ):
        with pytest.raises(ConfigError, match="got the directory of another model"):
            write_experts_model(tmp_path / "model", model, seed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 0}, "--experts: got 0; allowed: 1 to 512"),
        ({"chosen": 9}, r"--chosen: got 9; allowed: 1 to the number of experts \(8\)"),
        ({"skew": -0.1}, "--skew: got -0.1; allowed: 0 to 8"),
        ({"skew": float("nan")}, "--skew: got nan; allowed: 0 to 8"),
    ],
)
def test_sizes_that_make_no_model_are_refused(fields: dict[str, float], message: str) -> None:
    """By the option of the command line."""
    with pytest.raises(ConfigError, match=message):
        ExpertsModel.tiny("mixtral", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_as_popular_as_the_skew_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of ranks follow from it, so experiments must know it, in every layer."""
    bounds = {0.0: (1.0, 1.5), 0.5: (1.5, 2.5), 1.0: (2.2, 3.2), 2.0: (3.2, 4.0)}
    for skew, (low, high) in bounds.items():
        directory = tmp_path / str(skew)
        write_experts_model(directory, ExpertsModel.tiny(family, skew=skew), 0)
        for largest, counts in popularity(directory, 600, monkeypatch):
            assert low <= largest <= high
            if skew >= 1:
                assert counts[0] == max(counts)
                assert sum(counts[:2]) > sum(counts[2:4]) > sum(counts[4:6]) > sum(counts[6:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skew", [pytest.param(0.0, marks=pytest.mark.nightly), 2.0])
def test_greedy_output_varies_and_seldom_ends(family: str, skew: float, tmp_path: Path) -> None:
    """A stream that repeats one token or ends at once would not show a wrong one."""
    write_experts_model(tmp_path / "model", ExpertsModel.tiny(family, skew=skew), 0)
    worker = Worker(tmp_path / "model", EngineSettings(pages=64))
    tokenizer = load_tokenizer(tmp_path / "model")
    ended = 0

    for text in ("hello", "kalo miren. stavor", "日本 x 123"):
        ids: list[int] = tokenizer.encode(text).ids
        prompt, computed = len(ids), 0
        while len(ids) < prompt + 120:
            logits = worker.execute([Chunk(ids[computed:], computed, range(64), logits=1)])
            computed = len(ids)
            ids.append(int(logits[0].argmax()))
        assert len(set(ids[prompt:])) >= 20
        ended += bool(worker.eos_token_ids & set(ids[prompt:]))

    assert ended <= 1


def test_the_large_one_has_a_gigabyte_and_experts_of_parts() -> None:
    """Times of recoveries mean something from about that size on."""
    model = ExpertsModel.large("mixtral")

    experts = model.layers * model.experts * 3 * model.hidden * model.width * 4

    assert 1.0e9 <= experts <= 1.1e9
    assert model.width // 1024 >= 2
    with pytest.raises(ConfigError, match="--large: got family 'qwen3_moe'; allowed: mixtral"):
        ExpertsModel.large("qwen3_moe")


def test_the_command_writes_a_model_and_names_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m kvrs_testkit.random_experts --experts 8 --chosen 2 --skew 1 DIR`."""
    directory = str(tmp_path / "model")

    monkeypatch.setattr(sys, "argv", ["", "--experts", "8", "--chosen", "9", directory])
    with pytest.raises(SystemExit):
        random_experts.main()
    monkeypatch.setattr(sys, "argv", ["", "--skew", "1", directory])
    random_experts.main()

    assert "--chosen: got 9; allowed: 1 to the number of experts (8)" in capsys.readouterr().err
    assert Worker(tmp_path / "model", EngineSettings(pages=8)).vocab_size == 512
