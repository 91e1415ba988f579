"""LUMEN's experiments at the paper's operating points: what the fitted parameters do, and which
requests are in the window.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lumen.clocks import slowed
from experiments.lumen.fit import sought
from experiments.lumen.operating_points import QWEN_14B, prototype, simulator
from experiments.lumen.paper import EXHIBITS, VARIANTS, as_text, cell_of
from experiments.lumen.simulated import (
    LLAMA,
    OPT,
    TARGET,
    WHOLE,
    Case,
    Run,
    by_case,
    cell,
    config_of,
    draft_of,
    figures,
)
from experiments.virtual_time import NumberedPrompt
from kvrs.config.backup import BackupSettings
from kvrs_engine.scheduling.assisted import DraftCounts
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_lab.traces.records import StreamRecord

pytestmark = pytest.mark.nightly


def test_the_fitted_parameters_act_on_prompts_and_on_steps(tmp_path: Path) -> None:
    """A factor on prefill, and a fixed time for each step, whatever is in it."""
    decode, prompt = ([Chunk(range(tokens), 1200, [0], logits=1)] for tokens in (1, 700))
    before, after = Pace(TARGET), Pace(slowed(TARGET, tmp_path, prefill=2.5, step_s=0.02))

    assert after.batch_s(decode) == pytest.approx(before.batch_s(decode) + 0.02)
    assert after.batch_s(prompt) == pytest.approx(2.5 * before.batch_s(prompt) + 0.02)


@pytest.mark.parametrize("target", [0.9, 1.7, 4.0, 6.0, 400.0, 500.0])
def test_a_parameter_is_sought_between_two(target: float) -> None:
    """A figure that bends up, like a queue; beyond the span it is the span's end."""

    def figure(at: float) -> float:
        return 1.0 + at + 10.0 / (2.05 - at) if at < 2.05 else 1e9

    found = sought(figure, target, 0.1, 2.0)

    if target < figure(0.1):
        assert found == 0.1
    elif target > figure(2.0):
        assert found == 2.0
    else:
        assert figure(found) == pytest.approx(target, rel=0.25)


def test_prototypes_have_the_papers_load_and_disk(tmp_path: Path) -> None:
    """3 and 1.25 requests/s of a worker; weights at 0.5 GB/s (the paper: a recovery of 83 s)."""
    four, eight = (prototype(size, 2000.0, 0.02, tmp_path) for size in (4, 8))

    assert [4 * four.per_s, 8 * eight.per_s] == [12.0, 10.0]
    assert four.reload_s == pytest.approx(131.0 + 1.0, abs=0.5)
    assert eight.reload_s == pytest.approx(59.1 + 0.9, abs=0.5)
    assert four.draft is not None
    assert eight.draft is not None
    assert Pace(QWEN_14B).load_s < four.draft.load_s == pytest.approx(16.1, abs=0.1)
    assert (four.max_running, eight.max_batch_tokens) == (512, 1024)
    assert simulator(2.0, 0.01, tmp_path).reload_s == LLAMA.reload_s


def test_the_window_has_the_interrupted_with_their_replay() -> None:
    """A request is interrupted at 3 s, and those that come from then on until 9 s wait."""
    clean = [record(number, ttft_s=0.1) for number in range(160)]
    faulted = [record(number, ttft_s=1.0 if 30 <= number < 90 else 0.1) for number in range(160)]
    hit = faulted[25]
    hit.token_times_s[-1] = hit.ended_s = 5.0

    row = figures(
        Run(faulted, {25}, 3.0, DraftCounts()), Run(clean, set(), 3.0, DraftCounts()), LLAMA
    )

    assert row["in_window"] == 80  # Five buckets of 16.
    assert row["window_clean_ttft_s"] == pytest.approx(0.1)
    assert row["window_ttft_s"] == pytest.approx((19 * 0.1 + 60 * 1.0 + 2.5) / 80)
    assert row["hit_tpot_s"] == pytest.approx(2.4)


@pytest.mark.process
@pytest.mark.parametrize("variant", ["depth", "alpha"])
def test_variants_have_the_figures_of_whole_runs(variant: str) -> None:
    """B.6 and B.7: of each value as if it had been there from the beginning; others stand against
    the default, which is first.
    """
    draft = LLAMA.draft
    assert draft is not None
    setup = replace(
        OPT, requests=40, most_output=48, reload_s=2.0, draft=replace(draft, load_s=0.3)
    )
    name = f"3x1:6.0 {variant}#0"

    rows = cell_of({"": setup}, 1, {}, name)

    assert rows == cell(replace(setup, schemes=VARIANTS[variant]), "3x1:6.0#0", {})
    base, *others = rows
    text = as_text(by_case({name: rows}))
    assert [line for line in text.splitlines() if base in line and "(" in line] == []
    assert all(f"{other} " in text for other in others)
    if variant == "depth":
        accepted = {each: row["accepted_a_step"] for each, row in rows.items()}
        assert 0 < accepted["depth 2"] <= 2
        assert accepted["depth 8"] != accepted["depth 4"]


def test_the_default_of_a_variant_is_that_of_the_scheme() -> None:
    """LUMEN's own depth and weight, under another name; the paper's other values beside it."""
    depth, alpha = VARIANTS["depth"][0], VARIANTS["alpha"][0]

    assert replace(depth, name=WHOLE.name, acceptance=None) == WHOLE
    assert LLAMA.draft is not None
    assert depth.acceptance == LLAMA.draft.acceptance
    assert alpha.backup == {**WHOLE.backup, "alpha": BackupSettings().alpha}
    drafts = {each.depth: draft_of(LLAMA, each) for each in VARIANTS["depth"]}
    assert {at: each and each.acceptance for at, each in drafts.items()} == {
        4: 0.6,
        2: 0.72,
        8: 0.5,
    }
    case = Case.of(LLAMA, "4x1")
    assert [config_of(case, each).speculation.depth for each in VARIANTS["depth"]] == [4, 2, 8]
    assert {each.backup["alpha"] for each in VARIANTS["alpha"]} == {0.25, 0.5, 1.0, 2.0, 4.0}
    assert (EXHIBITS["B.6"], EXHIBITS["B.7"]) == (("10x1 depth",), ("10x1 alpha",))


def record(number: int, ttft_s: float) -> StreamRecord:
    at_s = number / 10
    times_s = [at_s + ttft_s, at_s + ttft_s + 0.2]
    return StreamRecord(
        number, at_s, 10, 2, sent_s=at_s, ended_s=times_s[-1], token_times_s=times_s
    )


def test_prompts_are_made_when_they_are_read() -> None:
    """Ids go round; requests of one number have the same ones, and of two numbers others."""
    prompt = NumberedPrompt(9, 40_000)

    assert len(prompt) == 40_000
    assert [*prompt] == [(9 * 7919 + place) % 50_000 for place in range(40_000)]
    assert [*prompt[30_000:30_002]] == [1271, 1272]
    assert prompt[:] == NumberedPrompt(9, 40_000)[:] != NumberedPrompt(10, 40_000)[:]
