"""RaidServe's instances in virtual time: step times of batches under layouts, and what has room."""

import pytest

from experiments.raidserve import peaks
from experiments.raidserve.curves import Cell, play
from experiments.raidserve.stages import (
    BUDGET_TOKENS,
    Instance,
    cyclic,
    decode,
    naive,
    ours,
    prefill,
    spread,
    standard,
)
from experiments.sentinels.rates import Model, models
from kvrs.profiles import catalog
from kvrs_lab.traces.mooncake import Trace, TraceRequest

pytestmark = pytest.mark.nightly

PROFILE = "llama-3.1-70b-h100-vllm-tp8"
LLAMA: Model = next(each for each in models() if each.name == "Llama-3.1-70B")


def asked(*lengths: tuple[int, int], every_s: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(n * every_s, *each, ()) for n, each in enumerate(lengths)]


def test_a_degree_with_a_profile_takes_the_profiles_times() -> None:
    eight, four = (standard(LLAMA, PROFILE, gpus) for gpus in (8, 4))

    for gpus, instance in ((8, eight), (4, four)):
        label = f"llama-3.1-70b-h100-vllm-tp{gpus}"
        prompt_s = catalog.prefill_table(label).seconds_for(2048)
        step_s = catalog.decode_table(label).seconds_for(40, 400_000)
        assert instance.prefill_s([2048], [0]) == pytest.approx(prompt_s)
        assert instance.decode_s(40, [400_000]) == pytest.approx(step_s, rel=0.01)
    behind_s = catalog.prefill_table(PROFILE).extra(16384, 2048)
    assert eight.prefill_s([2048], [2048 * 16384]) == pytest.approx(behind_s, rel=1e-6)


def test_the_busiest_rank_has_what_its_heads_and_its_base_have() -> None:
    """Seven ranks, eight heads: two of them, or one and what falls to its base of the other."""
    whole, one = naive(LLAMA, PROFILE, 7), ours(LLAMA, PROFILE, 7)

    assert whole.of_heads(1.0) == pytest.approx(2 / 8)
    assert cyclic(LLAMA, PROFILE, 7).of_heads(1.0) == pytest.approx(2 / 8)
    assert one.of_heads(1.0) == pytest.approx(2 / 8)
    assert one.of_heads(1 / 7) == pytest.approx(1 / 7)
    even = [2048 // 7] * 7
    assert one.prefill_s(even, even) < one.prefill_s([sum(even)] + [0] * 6, even)
    assert one.decode_s(70, [100_000] * 7) < one.decode_s(70, [400_000] + [50_000] * 6)


def test_cyclic_placement_has_room_for_more_and_takes_as_long() -> None:
    before, after = naive(LLAMA, PROFILE, 7), cyclic(LLAMA, PROFILE, 7)

    assert after.room_tokens > 1.7 * before.room_tokens
    assert after.decode_s(40, [500_000]) == pytest.approx(before.decode_s(40, [500_000]))


def test_prompts_come_one_after_the_other() -> None:
    """Each waits for those before it; a batch has the next tokens of the line."""
    instance = standard(LLAMA, PROFILE, 8)
    first_s = instance.prefill_s([BUDGET_TOKENS], [0])
    rest_s = instance.prefill_s([BUDGET_TOKENS], [1000 * BUDGET_TOKENS])

    found = prefill(instance, asked((BUDGET_TOKENS + 1000, 1), (BUDGET_TOKENS - 1000, 1)))

    assert found.tokens == 2 * BUDGET_TOKENS
    # The second batch: 1,000 tokens behind as many as a batch has, and all of the other prompt.
    second_s = instance.prefill_s([BUDGET_TOKENS], [1000 * BUDGET_TOKENS])
    assert second_s == rest_s
    assert found.waits_s == pytest.approx([first_s + second_s] * 2)
    later = prefill(instance, asked((BUDGET_TOKENS, 1), (BUDGET_TOKENS, 1), every_s=9.0))
    assert later.waits_s == pytest.approx([first_s] * 2)
    assert later.seconds == pytest.approx(9.0 + first_s)


def test_a_stream_without_room_waits_for_one_that_ends() -> None:
    """Its wait is part of its time per token."""
    instance = standard(LLAMA, PROFILE, 8)
    large = int(instance.room_tokens * 0.6)

    alone = decode(instance, asked((large, 100)))
    both = decode(instance, asked((large, 100), (large, 100)))

    assert alone.waits_s[0] == pytest.approx(alone.seconds / 100)
    assert both.waits_s[1] == pytest.approx(2 * both.waits_s[0])
    assert both.seconds == pytest.approx(2 * alone.seconds)
    small = decode(instance, asked((1000, 100), (1000, 100)))
    assert small.waits_s[0] == pytest.approx(small.waits_s[1])
    assert small.tokens == 200


def test_balanced_batches_and_bases_are_quicker_than_those_in_turns() -> None:
    """RaidServe's skew: prompts of unequal length, each longer than a batch."""
    prompts = asked(*((16_000 if n % 7 == 0 else 4_000, 1) for n in range(21)))

    by_load, in_turns = (
        prefill(make(LLAMA, PROFILE, 7), prompts).seconds for make in (ours, spread)
    )

    assert by_load < 0.95 * in_turns


def test_the_parts_of_a_gain_add_up_to_it() -> None:
    found = {"naive 7": [100.0, 200.0], "cyclic 7": [130.0, 280.0], "ours 7": [170.0, 360.0]}

    assert peaks.gains(found, "ours 7", "naive 7") == pytest.approx([0.7, 0.8])
    parts = peaks.parts(found)
    assert parts["memory"] == pytest.approx([0.3, 0.4])
    assert parts["compute"] == pytest.approx([0.4, 0.4])


def test_the_most_within_a_limit_lies_between_the_rates_at_which_it_is_kept_and_missed() -> None:
    trace = Trace(tuple(TraceRequest(float(n), 9000, 300, ()) for n in range(400)))

    found = play(Cell("Llama-3.1-70B", "prefill", "standard", 4), trace)

    within = [point for point in found["points"] if point["mean_s"] <= 10.0]
    assert 0 < len(within) < len(found["points"])
    assert found["at_limit"]["requests_per_s"] >= within[-1]["requests_per_s"]
    assert found["at_limit"]["tokens_per_s"] >= within[-1]["tokens_per_s"]
    waits = [point["mean_s"] for point in found["points"]]
    assert waits == pytest.approx(sorted(waits))


def test_instances_of_one_layout_are_alike_where_nothing_is_spread() -> None:
    """Four and eight ranks divide the heads evenly."""
    for gpus in (4, 8):
        made: list[Instance] = [make(LLAMA, PROFILE, gpus) for make in (standard, naive, ours)]
        found = [(each.room_tokens, each.prefill_s([2048], [0])) for each in made]
        assert found[1:] == [pytest.approx(found[0])] * 2
