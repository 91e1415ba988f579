"""The tables that come with kvrs."""

import pytest

from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.protocol.geometry import KvGeometry


def test_every_profile_says_what_it_was_made_on() -> None:
    """Model, GPU, engine, measured or estimated, source: a table without them is worth little."""
    profiles = [catalog.profile(name) for name in catalog.names()]

    assert profiles
    assert all(
        p.label
        and p.model
        and p.gpu
        and p.engine
        and p.source
        and p.kind in ("measured", "estimated")
        for p in profiles
    )


def test_the_seeds_table_is_there() -> None:
    """Seed KVRS: 512, 1024 and 2048 tokens take 30, 60 and 120 ms on an A100."""
    table = catalog.prefill_table("opt-13b-a100-kvrs-seed")

    assert [table.seconds_for(n) for n in (512, 1024, 2048)] == pytest.approx([0.03, 0.06, 0.12])


def test_distserves_fit_is_there() -> None:
    """DistServe's A100-80G fit for OPT-13B, TP 1: 18.1 ms, 0.102 ms per token, 7.12 ns per squared
    token; two decode regimes.
    """
    prefill = catalog.prefill_table("opt-13b-a100-distserve-tp1")
    decode = catalog.decode_table("opt-13b-a100-distserve-tp1")

    assert prefill.seconds_for(1000) == pytest.approx((18.1025 + 101.9123 + 7.1223) / 1e3, rel=1e-4)
    assert decode.seconds_for(94, 50_000) == pytest.approx(
        (19.9347 + 31.3468 + 3.6197) / 1e3, rel=1e-4
    )
    assert decode.seconds_for(95, 50_000) == pytest.approx(
        (7.1662 + 28.9900 + 15.0395) / 1e3, rel=1e-4
    )


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
    with pytest.raises(ConfigError, match=r"allowed: .*opt-13b-a100-distserve-tp1"):
        catalog.decode_table("opt-13b-a100-kvrs-seed")


@pytest.mark.parametrize("name", catalog.names())
def test_every_profile_predicts_times_that_grow(name: str) -> None:
    """Each file is a table that answers: longer prompts, longer prefixes and larger batches never
    take less.
    """
    table = catalog.prefill_table(name)

    assert 0 < table.seconds_for(256) <= table.seconds_for(2048) < table.seconds_for(200_000)
    assert table.extra(0, 512) <= table.extra(1024, 512) + 1e-9 or table.grid is None
    if catalog.profile(name).decode is not None:
        decode = catalog.decode_table(name)
        assert (
            0
            < decode.seconds_for(1, 1000)
            <= decode.seconds_for(1, 2000)
            <= decode.seconds_for(2, 4000)
        )


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("opt-13b-a100-distserve-tp1", 819_200),
        ("opt-66b-a100-distserve-tp4", 2_359_296),
        ("llama-3.1-8b-h100-vllm-tp1", 131_072),
        ("llama-3.1-70b-h100-vllm-tp4", 327_680),
        ("qwen3-14b-h100-vllm-tp1", 163_840),
        ("qwen3-32b-h100-vllm-tp2", 262_144),
        ("mixtral-8x22b-h100-vllm-tp8", 229_376),
    ],
)
def test_kv_bytes_follow_the_published_configurations(name: str, bytes_per_token: int) -> None:
    """`2 * layers * kv_heads * 128 * 2 bytes`: 40x40, 64x72, 32x8, 80x8, 40x8, 64x8 and 56x8 layers
    by KV heads.
    """
    assert catalog.kv_geometry(name).bytes_per_token == bytes_per_token


def test_what_others_estimated_or_kvrs_scaled_is_labelled_so() -> None:
    """Only DistServe's and the seed's figures were measured."""
    measured = {name for name in catalog.names() if catalog.profile(name).kind == "measured"}

    assert all("distserve" in name or name.startswith("opt-") for name in measured)
    assert all(
        catalog.profile(name).kind == "estimated"
        for name in catalog.names()
        if not name.startswith("opt-")
    )
    assert "scaled" in catalog.profile("llama-3.1-8b-h100-vllm-tp1").source


def test_a_cached_prefix_is_predicted_as_the_source_has_it() -> None:
    """aiconfigurator, Qwen3-14B on H100, TP 1: 512 tokens behind 7,680 take 27.2 ms, 2,048 behind
    30,720 take 158.7 ms.
    """
    table = catalog.prefill_table("qwen3-14b-h100-vllm-tp1")

    assert table.extra(7680, 512) == pytest.approx(0.0271971, rel=0.01)
    assert table.extra(30720, 2048) == pytest.approx(0.1587027, rel=0.01)
    assert table.behind(30720, 32768, table.seconds_for(32768)) == (table.extra(30720, 2048), True)


def test_links_are_there() -> None:
    """Vidur's fits: 47.2 us and 7.8 GB/s between A100 nodes."""
    link = catalog.links()["a100-dgx-inter-node"]

    assert (link.transfer.alpha_s, link.transfer.bytes_per_s, link.kind) == (
        47.2e-6,
        7.8e9,
        "measured",
    )
