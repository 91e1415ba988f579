"""`kvrs explain` at the command line."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvrs.errors import ConfigError
from kvrs.explain import ExplainOptions, parse_bandwidth, run_explain
from kvrs.policy.config import PolicyName

SEED = ExplainOptions(
    profile="opt-13b-a100-kvrs-seed", prompt_tokens=1477, bandwidth="25Gbit/s", service_s=0.06, policy=PolicyName.ROM
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25Gbit/s", 3.125e9),
        ("3.1GB/s", 3.1e9),
        ("800 Mbps", 1e8),
        ("1e3kB/s", 1e6),
        ("1GiB/s", 2.0**30),
        ("5B/s", 5.0),
        ("h100-dgx-inter-node", 34.4e9),
    ],
)
def test_bandwidths_have_units_or_are_links(text: str, bytes_per_s: float) -> None:
    """Bits and bytes are told apart; a bare number is not."""
    assert parse_bandwidth(text, "--bandwidth") == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "25", "25G", "0Gbit/s", "-1GB/s", "fastGB/s", "1e999GB/s", "25Gbit"])
def test_a_bandwidth_without_a_unit_is_refused(text: str) -> None:
    """Option, value, what is allowed."""
    with pytest.raises(ConfigError, match=r"--bandwidth: got .*; allowed: .*25Gbit/s"):
        parse_bandwidth(text, "--bandwidth")


def test_the_table_shows_the_choice_and_where_it_would_change() -> None:
    """The seed's example, in plain text."""
    shown = io.StringIO()

    run_explain(SEED, Console(file=shown, width=160))

    text = shown.getvalue()
    assert "1,477 tokens: 1,210.0 MB / 3.12 GB/s" in text
    assert "crossover bandwidth: 13.98 GB/s (111.8 Gbit/s)" in text
    assert "hand-off crossover queue depth: 6.45 requests" in text


def test_json_holds_question_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: a version, the profile's labels, what was asked, what was answered."""
    run_explain(ExplainOptions(profile="llama-3.1-70b-h100-vllm-tp4", prompt_tokens=8000, queue_depth=2, json=True))

    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["profile"]["kind"], found["question"]["prompt_tokens"]) == (1, "estimated", 8000)
    assert found["question"]["queue_s"] == pytest.approx(2 * found["question"]["service_s"])
    assert {option["option"] for option in found["answer"]["options"]} == {"migrate", "recompute"}


def test_a_profile_that_is_none_is_named_by_its_option() -> None:
    """And the links and profiles that there are."""
    with pytest.raises(ConfigError, match=r"^--profile: got 'nope'; allowed: a path to a profile, or llama"):
        run_explain(replace(SEED, profile="nope"))


def test_a_link_that_carries_nothing_has_no_crossover() -> None:
    """Infinity is no number of requests."""
    shown = io.StringIO()

    run_explain(replace(SEED, bandwidth="1e-320bit/s"), Console(file=shown, width=160))

    assert "hand-off crossover queue depth: none" in shown.getvalue()


def test_wrong_options_are_named_all_at_once() -> None:
    """One line each, with what is allowed."""
    options = ExplainOptions(
        profile=SEED.profile, prompt_tokens=0, output_tokens=-1, held_tokens=5, bandwidth="quick", queue_depth=1, queue_s=1
    )

    with pytest.raises(ConfigError) as refused:
        run_explain(options)

    assert len(refused.value.faults) == 5
