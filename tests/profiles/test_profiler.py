"""`kvrs profile`, on the tiny model."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.catalog import DecodeRows, PrefillRows
from kvrs_engine.engine.profiler import ProfileOptions, run_profile


def test_a_measured_profile_is_one_that_can_be_used(tmp_path: Path) -> None:
    """Prefill in two dimensions, decode by batch and context, labels: written so that it is read
    back.
    """
    shown = io.StringIO()
    options = ProfileOptions(
        out=tmp_path / "new" / "mine.json", longest_tokens=64, max_batch=3, repeats=1
    )

    path = run_profile(options, Console(file=shown))

    profile = catalog.profile(str(path))
    assert isinstance(profile.prefill, PrefillRows)
    assert (
        len(profile.prefill.rows),
        len(profile.prefill.rows[0]),
        profile.prefill.new_step_tokens,
    ) == (5, 9, 8)
    assert isinstance(profile.decode, DecodeRows)
    assert (profile.decode.batches, profile.decode.contexts) == ([1, 2, 3], [16, 32, 48, 64])
    assert (profile.kind, profile.tp, profile.gpu) == ("measured", 1, None)
    assert profile.cpu
    assert catalog.prefill_table(str(path)).extra(64, 64) > 0
    assert catalog.load_s(str(path)) > 0
    assert "prefill" in shown.getvalue()
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]


def test_wrong_options_are_named_at_once_and_nothing_is_measured(tmp_path: Path) -> None:
    """Option, value, what is allowed."""
    options = ProfileOptions(
        out=tmp_path / "mine.txt",
        model=tmp_path,
        longest_tokens=1,
        max_batch=1,
        repeats=0,
        device="tpu",
    )

    with pytest.raises(ConfigError) as refused:
        run_profile(options)

    assert len(refused.value.faults) == 6
    assert not list(tmp_path.iterdir())


def test_lengths_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    """New and cached tokens together are positions."""
    with pytest.raises(ConfigError, match="allowed: at most 4096"):
        run_profile(ProfileOptions(out=tmp_path / "mine.json", longest_tokens=5000, repeats=1))


@pytest.mark.parametrize("place", ["/proc/mine.json", "/proc/mine/mine.json"])
def test_a_place_that_cannot_be_written_to_is_refused_before_the_measurement(place: str) -> None:
    """It takes minutes, and its result would be lost."""
    with pytest.raises(ConfigError, match=r"^--out: /proc"):
        run_profile(ProfileOptions(out=Path(place), longest_tokens=16, repeats=1))
