"""AnchorTP's losses degree by degree, in virtual time."""

import pytest

from experiments.anchortp import degrees
from experiments.anchortp.degrees import (
    KEPT,
    MODELS,
    WHOLE,
    missed,
    peak_requests_per_s,
    play,
    rates_of,
)

pytestmark = pytest.mark.nightly


def test_a_rank_reads_what_is_lost_and_not_its_whole_shard() -> None:
    """A dense model reads 1 / k of the weights of layers, by one loader for all."""
    model = MODELS["Qwen3-32B"]
    layers_bytes = model.units().total_bytes - model.units().common_bytes

    for degree in (4, 3):
        kept, read_bytes = rates_of(model, degree, KEPT)
        slow, whole_bytes = rates_of(model, degree, WHOLE)
        assert read_bytes == pytest.approx(layers_bytes / degree, rel=0.06)
        assert whole_bytes > 0.95 * layers_bytes
        assert kept.host_bytes_per_s == degrees.LOADER_BYTES_PER_S / (degree - 1)
        assert kept.host_bytes_per_s / slow.host_bytes_per_s == pytest.approx(degree, rel=0.2)


def test_first_tokens_come_after_the_bytes_of_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load, after an earlier loss without any."""
    monkeypatch.setattr(degrees, "BEFORE_S", 6.0)
    monkeypatch.setattr(degrees, "AFTER_S", 20.0)

    kept, whole = (play("Qwen3-32B", 3, way, seed=0, requests_per_s=1.0) for way in (KEPT, WHOLE))

    for row in (kept, whole):
        read_s = row.read_bytes / degrees.LOADER_BYTES_PER_S
        assert read_s < row.tfs_s < 1.3 * read_s + 3.0
        assert row.ttp_s is not None
    assert whole.tfs_s > 2 * kept.tfs_s


def test_more_ranks_serve_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of a loss follows from the peak of the ranks that it leaves."""
    monkeypatch.setattr(degrees, "WARM_S", 3.0)
    monkeypatch.setattr(degrees, "PEAK_S", 5.0)

    two, four = (peak_requests_per_s("Qwen3-32B", ranks) for ranks in (2, 4))

    assert 1.2 * two < four < 2 * two


def test_ways_that_are_as_quick_are_a_miss() -> None:
    rows = [
        {"model": name, "degree": 4, "way": way, "seed": 0, "tfs_s": tfs_s}
        for name in MODELS
        for way, tfs_s in ((KEPT, 5.0), (WHOLE, 50.0))
    ]
    assert missed(rows) == []
    rows[0]["tfs_s"] = 50.0
    assert missed(rows) == ["Llama-3.1-70B, 4 ranks: 50.00 s; bar: less than 50.00, whole"]
