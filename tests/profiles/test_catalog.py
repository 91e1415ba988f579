"""The tables that come with kvrs."""

import pytest

from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.protocol.geometry import KvGeometry


def test_every_profile_says_what_it_was_made_on() -> None:
    """Model, GPU, engine, measured or estimated, source: a table without them is worth little."""
    profiles = [catalog.profile(name) for name in catalog.names()]

    assert profiles
    assert all(p.label and p.model and p.gpu and p.engine and p.source and p.kind in ("measured", "estimated") for p in profiles)


def test_the_seeds_table_is_there() -> None:
    """Seed KVRS: 512, 1024 and 2048 tokens take 30, 60 and 120 ms on an A100."""
    table = catalog.prefill_table("opt-13b-a100-kvrs-seed")

    assert [table.seconds_for(n) for n in (512, 1024, 2048)] == pytest.approx([0.03, 0.06, 0.12])


def test_distserves_fit_is_there() -> None:
    """DistServe's A100-80G fit for OPT-13B, TP 1: 18.1 ms, 0.102 ms per token, 7.12 ns per squared token; two decode regimes."""
    prefill = catalog.prefill_table("opt-13b-a100-distserve-tp1")
    decode = catalog.decode_table("opt-13b-a100-distserve-tp1")

    assert prefill.seconds_for(1000) == pytest.approx((18.1025 + 101.9123 + 7.1223) / 1e3, rel=1e-4)
    assert decode.seconds_for(94, 50_000) == pytest.approx((19.9347 + 31.3468 + 3.6197) / 1e3, rel=1e-4)
    assert decode.seconds_for(95, 50_000) == pytest.approx((7.1662 + 28.9900 + 15.0395) / 1e3, rel=1e-4)


def test_opt_13b_takes_819200_bytes_per_token() -> None:
    """40 layers, 40 heads of 128, keys and values, two bytes each."""
    geometry = catalog.kv_geometry("opt-13b-a100-kvrs-seed")

    assert geometry == KvGeometry(40, 40, 128, 2, 16)
    assert geometry.bytes_per_token == 819_200


@pytest.mark.parametrize("name", ["", "no-such", "../catalog", "opt-13b-a100-kvrs-seed.json"])
def test_an_unknown_profile_is_refused_with_what_there_is(name: str) -> None:
    """A user's error names the value and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        catalog.prefill_table(name)

    assert repr(name) in str(refused.value)
    assert "opt-13b-a100-kvrs-seed" in str(refused.value)


def test_a_profile_without_decode_figures_is_refused_as_a_decode_table() -> None:
    """The seed lists prefill times only; nothing is made up in their place."""
    with pytest.raises(ConfigError, match="allowed: opt-13b-a100-distserve-tp1"):
        catalog.decode_table("opt-13b-a100-kvrs-seed")
