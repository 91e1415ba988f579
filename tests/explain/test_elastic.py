"""`kvrs lab explain --elastic`: bytes and seconds of the loss of a rank."""

import json
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.errors import ConfigError
from kvrs_lab.explain.elastic import raidserve_s

RAIDSERVE = ("--elastic", "llama-3.1-70b-h100-vllm-tp8", "--backup", "host")
BARE = (*RAIDSERVE[:2], "--backup", "off")
EXPERTS = ("--elastic", "mixtral-8x22b-h100-vllm-tp8")


@cache
def explained(*options: str) -> str:
    """The output of `kvrs lab explain` with these options."""
    result = CliRunner(env={"COLUMNS": None}).invoke(app, ["lab", "explain", *options])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def answer_to(*options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(explained(*options, "--json"))["answer"]
    return answer


def test_raidserves_arithmetic_is_met() -> None:
    """20 + 5 GB and 7.5 GB over links of 50 GB/s (3.2 of the paper)."""
    seconds = raidserve_s(362e9)

    assert seconds["host"] == pytest.approx(0.50, abs=0.001)
    assert seconds["on demand"] == pytest.approx(0.15, abs=0.001)


def test_on_demand_reads_only_what_was_lost() -> None:
    """An eighth of weights and KV from the host, tiles of the MLP never from a peer."""
    answer = answer_to(*RAIDSERVE)

    moved = {each["kind"]: each for each in answer["moved"]}
    # Without the embeddings.
    lost = answer["weight_bytes"] - 128256 * 8192 * 2 + answer["kv_bytes"]
    assert sum(each["host_bytes"] for each in answer["moved"]) == lost // 8
    assert moved["mlp"]["peer_bytes"] == 0
    assert [rung["way"] for rung in answer["ladder"]] == ["on demand", "cmm", "host", "recompute"]
    assert {rung["way"]: rung["published_s"] for rung in answer["ladder"]} == {
        "on demand": 0.12,
        "cmm": None,
        "host": 0.53,
        "recompute": None,
    }


def test_streams_are_decided_by_the_policy_for_every_way_of_the_instance() -> None:
    """With a backup all stay: the last one of 56 waits for the cells of those before it, 37.6 GB
    over seven links of 50 GB/s. Without, and with a quick link, some leave.
    """
    backed, bare = answer_to(*RAIDSERVE), answer_to(*BARE, "--bandwidth", "100Gbit/s")

    ways = [(way["way"], way["ranks"], way["is_chosen"]) for way in backed["ways"]]
    assert ways == [("reshard", 7, True), ("replace", 8, False)]
    for way in (*backed["ways"], *bare["ways"]):
        assert sum(each["streams"] for each in way["options"]) + way["waiting"] == 56
    options = backed["ways"][0]["options"]
    stay = next(each for each in options if each["option"] == "in_place")
    assert stay["streams"] == 56
    assert stay["last_s"] - stay["first_s"] == pytest.approx(55 / 56 * 37.58e9 / 7 / 50e9, rel=1e-3)
    taken = {each["option"] for each in bare["ways"][0]["options"] if each["streams"]}
    assert taken - {"in_place"}


def test_without_a_backup_every_way_recomputes() -> None:
    answer = answer_to(*BARE)

    assert all(rung["recompute_s"] > 20 for rung in answer["ladder"])
    assert "cells" not in {each["kind"] for each in answer["moved"]}


def test_experts_with_copies_cost_a_loss_fewer_bytes() -> None:
    """An eighth of all experts without copies, whole or split; with them as much less as the lost
    ranks had of what others have too. Copies make whole experts as even as they have room for.
    """
    answer = answer_to(*EXPERTS, "--zipf", "0.5", "--room-share", "1")

    experts = answer["experts"]
    of_layers = 56 * 8 * experts["expert_bytes"]
    assert experts["expert_bytes"] == 3 * 6144 * 16384 * 2
    assert (experts["count"], experts["parts"]) == (8, 8)
    assert [way["layout"] for way in experts["ways"]] == ["whole", "whole, with copies", "split"]
    bare, copied, split = experts["ways"]
    assert bare["host_bytes"] == split["host_bytes"] == of_layers // 8
    assert bare["copies"] == split["copies"] == 0
    assert copied["copies"] * experts["expert_bytes"] == 8 * copied["copy_bytes"]
    assert copied["host_bytes"] < 0.7 * bare["host_bytes"]
    assert copied["moving_s"] < bare["moving_s"] == split["moving_s"]
    assert {each["kind"]: each for each in answer["moved"]}["mlp"]["host_bytes"] == of_layers // 8
    assert split["skew"] == pytest.approx(1.0)
    assert copied["skew"] < 1.05 < 1.5 < bare["skew"]
    assert f"{copied['host_bytes']:,}" in explained(*EXPERTS, "--zipf", "0.5", "--room-share", "1")


def test_without_room_experts_have_no_copies_and_dense_models_no_experts() -> None:
    """By itself room is that of `elastic.experts`."""
    bare, copied, _ = answer_to(*EXPERTS, "--room-share", "0")["experts"]["ways"]
    usual = answer_to(*EXPERTS)["experts"]["ways"][1]

    assert bare | {"layout": ""} == copied | {"layout": ""}
    assert 0 < usual["copy_bytes"] <= 0.1 * answer_to(*EXPERTS)["weight_bytes"]
    assert "experts" not in answer_to(*RAIDSERVE)


def test_people_and_programs_get_the_same_figures() -> None:
    page, answer = explained(*RAIDSERVE), answer_to(*RAIDSERVE)

    for each in answer["moved"]:
        assert f"{each['host_bytes']:,}" in page
    for each in (*answer["ladder"], *answer["ways"]):
        assert each["way"] in page
    for each in answer["ladder"]:
        assert f"{each['peer_bytes']:,}" in page
    assert answer["ways"][0]["options"][0]["option"] == "in_place"
    assert "530 and 120 ms were measured" in page
    assert "figure 4" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tp", "1"), "--tp: got 1; allowed: 2 to 1024"),
        (("--tp", "3"), "--tp, --lost: tp 3 does not divide the model's 8 KV heads evenly"),
        (("--lost", "8"), "--lost: got 8; allowed: 1 to 7"),
        (("--requests", "0"), "--requests: got 0; allowed: 1 to 65536"),
        (("--context", "16M"), "--context: got '16M'"),
        (("--context", "0"), "--context: got '0'"),
        (
            ("--zipf", "1"),
            "--zipf: got 1.0; allowed: none, meta-llama/Llama-3.1-70B has no experts",
        ),
        (("--room-share", "0"), "--room-share: got 0.0; allowed: none"),
        ((*EXPERTS, "--zipf", "nan"), "--zipf: got nan; allowed: 0 to 8"),
        ((*EXPERTS, "--room-share", "8.1"), "--room-share: got 8.1; allowed: 0 to 8"),
        (("--elastic", "none"), "--elastic: got 'none'"),
        (("--host-bandwidth", "50"), "--host-bandwidth: got '50'"),
        (("--elastic", "opt-13b-a100-kvrs-seed"), "states no tensor parallel degree"),
    ],
)
def test_wrong_options_are_named(options: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        explained(*RAIDSERVE, *options)
