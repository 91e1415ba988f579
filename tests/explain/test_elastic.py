"""`kvrs explain --elastic`: bytes and seconds of the loss of a rank."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvrs.errors import ConfigError
from kvrs.explain.elastic import explain_elastic, raidserve_s
from kvrs.explain.show_elastic import (
    ElasticOptions,
    KvBackup,
    ask_elastic,
    run_explain_elastic,
)
from kvrs.policy.model.estimates import Option

RAIDSERVE = ElasticOptions(elastic="llama-3.1-70b-h100-vllm-tp8", backup=KvBackup.HOST)


def test_raidserves_arithmetic_is_met() -> None:
    """20 + 5 GB and 7.5 GB over links of 50 GB/s (3.2 of the paper)."""
    seconds = raidserve_s(362e9)

    assert seconds["host"] == pytest.approx(0.50, abs=0.001)
    assert seconds["on demand"] == pytest.approx(0.15, abs=0.001)


def test_on_demand_reads_only_what_was_lost() -> None:
    """An eighth of weights and KV from the host, tiles of the MLP never from a peer."""
    answer = explain_elastic(ask_elastic(RAIDSERVE))

    moved = {each.kind: each for each in answer.moved}
    lost = answer.weight_bytes - 128256 * 8192 * 2 + answer.kv_bytes  # Without the embeddings.
    assert sum(each.host_bytes for each in answer.moved) == lost // 8
    assert moved["mlp"].peer_bytes == 0
    assert answer.ladder[0].way == "on demand"
    assert [rung.way for rung in answer.ladder] == ["on demand", "cmm", "host", "recompute"]
    assert {rung.way: rung.published_s for rung in answer.ladder} == {
        "on demand": 0.12,
        "cmm": None,
        "host": 0.53,
        "recompute": None,
    }


def test_streams_are_decided_by_the_policy_for_every_way_of_the_instance() -> None:
    """With a backup all stay: the last one of 56 waits for the cells of those before it, 37.6 GB
    over seven links of 50 GB/s. Without, and with a quick link, some leave.
    """
    quick = replace(RAIDSERVE, backup=KvBackup.OFF, bandwidth="100Gbit/s")
    backed, bare = (explain_elastic(ask_elastic(each)) for each in (RAIDSERVE, quick))

    assert [(way.way, way.ranks) for way in backed.ways] == [("reshard", 7), ("replace", 8)]
    assert [way.is_chosen for way in backed.ways] == [True, False]
    for way in (*backed.ways, *bare.ways):
        assert sum(each.streams for each in way.options) + way.waiting == 56
    stay = next(each for each in backed.ways[0].options if each.option is Option.IN_PLACE)
    assert stay.streams == 56
    assert stay.first_s is not None
    assert stay.last_s is not None
    assert stay.last_s - stay.first_s == pytest.approx(55 / 56 * 37.58e9 / 7 / 50e9, rel=1e-3)
    taken = {each.option for each in bare.ways[0].options if each.streams}
    assert taken - {Option.IN_PLACE}


def test_without_a_backup_every_way_recomputes() -> None:
    answer = explain_elastic(ask_elastic(replace(RAIDSERVE, backup=KvBackup.OFF)))

    assert all(rung.recompute_s > 20 for rung in answer.ladder)
    assert "cells" not in {each.kind for each in answer.moved}


def test_people_and_programs_get_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    page = io.StringIO()

    run_explain_elastic(RAIDSERVE, Console(file=page, width=200))
    run_explain_elastic(replace(RAIDSERVE, json=True))

    found = json.loads(capsys.readouterr().out)
    assert found["answer"]["ladder"][0]["way"] == "on demand"
    assert "host 0.50 s, on demand 0.15 s; measured there: 0.53 s and 0.12 s" in page.getvalue()
    assert f"{found['answer']['moved'][0]['host_bytes']:,}" in page.getvalue()
    assert found["answer"]["ways"][0]["options"][0]["option"] == "in_place"
    assert "reshard: 7 ranks serve after 0.050 s, steps x 1.38 <- taken" in page.getvalue()
    assert "figure 4" in page.getvalue()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 1}, "--tp: got 1; allowed: 2 to 1024"),
        ({"tp": 3}, "--tp, --lost: tp 3 does not divide the model's 8 KV heads evenly"),
        ({"lost": 8}, "--lost: got 8; allowed: 1 to 7"),
        ({"requests": 0}, "--requests: got 0; allowed: 1 to 65536"),
        ({"context": "16M"}, "--context: got '16M'"),
        ({"context": "0"}, "--context: got '0'"),
        ({"elastic": "none"}, "--elastic: got 'none'"),
        ({"host_bandwidth": "50"}, "--host-bandwidth: got '50'"),
        ({"elastic": "opt-13b-a100-kvrs-seed"}, "states no tensor parallel degree"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_explain_elastic(replace(RAIDSERVE, **changes))  # type: ignore[arg-type]
