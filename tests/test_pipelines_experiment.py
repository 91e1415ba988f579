"""The experiments with pipelines judge what they have seen by all their bars."""

from collections import Counter
from typing import Any

import pytest

from experiments.pipelines import replication, series, table1
from experiments.pipelines.two import (
    KINDS,
    config_of,
    deaths_of,
    has_all,
    is_whole,
    longest_gap_s,
    parts_of,
    requests_of,
    serves,
)
from kvrs_lab.traces.records import ErrorKind, StreamRecord

pytestmark = pytest.mark.nightly

Row = dict[str, Any]


def row(pids: tuple[int, ...] = (1, 2, 3), **changes: Any) -> Row:
    stages = [
        {"stage": at, "host_pid": pid, "read_bytes": 100, "donor": None}
        for at, pid in enumerate(pids)
    ]
    ranks = [{"rank": at, "stage": at} for at in range(len(pids))]
    of_row = {"health": "up", "state": "full", "pid": 9, "stages": stages, "ranks": ranks}
    return of_row | changes


def record(*times_s: float, index: int = 0, stream: str = "s", ends: bool = True) -> StreamRecord:
    found = StreamRecord(index, 0.0, 8, 100, stream=stream, token_times_s=list(times_s))
    if ends:
        found.finish_reason = "length"
    else:
        found.fail(ErrorKind.RESET, "broke off")
    return found


def death(**changes: Any) -> Row:
    found: Row = {"kind": "host", "serves_s": 0.1, "whole_s": 4.0, "changed": []}
    return found | {"attempts_changed": 0, "streams": 2, "stayed": 1, "left": 1} | changes


def figures(**changes: Any) -> Row:
    found: Row = dict.fromkeys(series.WRONG, 0)
    found |= {"streams": 10, "kills_left": 0, "deaths": [death()], "causes": {}}
    return found | changes


def test_every_stage_has_a_node_of_its_own() -> None:
    """And all pipelines are divided alike."""
    config = config_of(3, group=False)

    instances = [one for _, one in config.cluster.instances()]
    nodes = [one.stage_nodes(node.id) for node, one in config.cluster.instances()]
    assert [one.own_stages for one in instances] == [range(0), range(0)]
    assert len({node for of in nodes for node in of}) == 6


def test_a_series_has_every_kind_of_death_before_one_comes_again() -> None:
    """The same ones for a seed; two hosts of a death are two."""
    found = deaths_of(8, 3, seed=1)

    assert Counter(each.kind for each in found[: len(KINDS)]) == Counter(KINDS)
    assert all(each.stage != each.other for each in found)
    assert found == deaths_of(8, 3, seed=1)
    assert found != deaths_of(8, 3, seed=2)


def test_every_second_stream_is_sampled() -> None:
    """With a seed of its own, so that its tokens are the same in both runs."""
    found = requests_of(20, 5.0, (100, 400), seed=3)

    assert [each.temperature > 0 for each in found] == [False, True] * 10
    assert len({each.seed for each in found if each.seed is not None}) == 10
    assert found == requests_of(20, 5.0, (100, 400), seed=3)


@pytest.mark.parametrize(
    ("changes", "is_serving", "all_its_own"),
    [
        ({}, True, True),
        ({"state": "reforming"}, False, False),
        ({"state": None, "health": "down"}, False, False),
        ({"ranks": [{"rank": 0, "stage": 0}]}, False, False),
        ({"stages": []}, False, False),
    ],
    ids=["whole", "re-forms", "down", "without a rank", "without stages"],
)
def test_an_instance_serves_where_it_computes_all_stages(
    changes: Row, is_serving: bool, all_its_own: bool
) -> None:
    assert serves(row(**changes), 3) is is_serving
    assert is_whole(row(**changes), 3) is all_its_own


def test_a_borrowed_stage_serves_and_is_not_whole() -> None:
    """Its host is another instance's: its process is none of the borrower's."""
    borrowed = row()
    borrowed["stages"][1]["donor"] = "d1"

    assert serves(borrowed, 3)
    assert has_all(borrowed, 3)
    assert not is_whole(borrowed, 3)
    assert parts_of({"d0": borrowed}).keys() == {"d0-stage-0", "d0-stage-2"}


def test_survivors_that_are_other_processes_or_read_again_are_named() -> None:
    """Those that were killed are not."""
    before = {"d0": row((1, 2, 3)), "d1": row((4, 5, 6))}
    after = {"d0": row((1, 12, 3)), "d1": row((4, 5, 16))}
    after["d0"]["stages"][0]["read_bytes"] = 200

    assert series.changed(before, before, [("d0", 1)]) == []
    assert series.changed(before, after, [("d0", 1)]) == ["d0-stage-0", "d1-stage-2"]
    assert series.changed(before, after, [("d0", 1), ("d1", 2), ("d0", None)]) == ["d0-stage-0"]


def test_streams_stay_or_leave_by_their_first_recovery() -> None:
    """A stream that stayed has the attempt that it had; others of the proxy do not count."""

    def recovered(stream: str, option: str, to: str, attempt: int = 1, **more: str) -> Row:
        found = {"stream": stream, "option": option, "to": to, "attempt": attempt}
        return found | {"outcome": "resumed"} | more

    rows = [
        recovered("a", "in_place", "d0"),
        recovered("b", "substitute", "d0", attempt=2),
        recovered("c", "recompute", "d1", attempt=2),
        recovered("e", "in_place", "d0", outcome="failed"),
        recovered("e", "recompute", "d1", attempt=2),
        recovered("x", "recompute", "d0"),
    ]
    found = series.kept({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, rows, "d0")

    assert (found["stayed"], found["left"]) == (["a", "b"], ["c", "e"])
    assert found["attempts_changed"] == 1
    assert found["options"] == {"in_place": 2, "substitute": 1, "recompute": 1}


def test_a_gap_counts_where_it_overlaps_the_loss() -> None:
    """Also one that had begun before it, or ends behind it; those of other times do not count."""
    times_s = [0.0, 5.0, 6.0, 6.5, 9.0, 30.0]

    assert longest_gap_s(times_s, 5.5, 7.0) == 2.5
    assert longest_gap_s(times_s, 5.5, 6.2) == 1.0
    assert longest_gap_s(times_s, 31.0, 32.0) == 0


def test_gaps_are_those_of_streams_that_stayed_left_and_were_elsewhere() -> None:
    """From the death until the victim is whole."""
    lost = {"killed_s": 1.0, "whole_s": 2.0, "streams": {"a": 1, "b": 1}}
    records = [
        record(0.0, 1.5, 1.6, stream="a"),
        record(0.9, 1.2, 9.0, stream="b"),
        record(0.9, 1.1, stream="c"),
        record(0.1, 0.9, stream="d"),
    ]

    found = series.with_gaps(death(**lost, stayed=["a"], left=["b"]), records)

    gaps = [found[f"gap_{what}_s"] for what in ("stayed", "left", "others")]
    assert gaps == pytest.approx([1.5, 7.8, 0.2])
    assert (found["streams"], found["stayed"], found["left"]) == (2, 1, 1)


def test_failed_streams_have_their_causes_beside_them() -> None:
    """Requests that were refused are told from streams that broke off."""
    records = [record(), record(1.0, ends=False), record(2.0, ends=False), record(ends=False)]

    assert series.causes_of(records) == {
        "after tokens: reset: broke off": 2,
        "without a token: reset: broke off": 1,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"tokens_lost": 2}, ["2 tokens lost"]),
        ({"kills_left": 3}, ["3 deaths never came"]),
        ({"deaths": [death(whole_s=None)]}, ["host: never whole"]),
        ({"deaths": [death(attempts_changed=1)]}, ["1 streams stayed in another attempt"]),
        ({"deaths": [death(changed=["d0-stage-0"])]}, ["host: d0-stage-0 changed"]),
    ],
    ids=["nothing", "lost", "left", "whole", "attempts", "changed"],
)
def test_a_series_is_judged_by_all_its_bars(changes: Row, said: list[str]) -> None:
    assert series.missed(figures(**changes)) == said
    last = series.as_text(figures(**changes), "wait").splitlines()[-1]
    assert last == (f"MISSED: {said[-1]}" if said else "PASSED")


def test_published_rows_are_all_forty() -> None:
    """Eight of scene 1, and sixteen of either other one."""
    rows = table1.published()

    assert Counter(scene for scene, _ in rows) == {"1": 8, "2": 16, "3": 16}
    assert rows["1", 2.0]["base_ttft_s"] == 73.84
    assert rows["3", 16.0]["ours_ttft_s_p99"] == 971.49


def test_the_loss_of_a_node_costs_less_with_a_borrowed_stage() -> None:
    """Requests for 60 s at a rate that one pipeline cannot bear. A GPU that always computes gains
    nothing by it.
    """
    case = table1.Case("1", 3.0)

    def of(system: str, computing_share: float = table1.COMPUTING_SHARE) -> dict[str, float]:
        return table1.simulate(
            case, system, 0, run_s=60.0, fails_s=40.0, computing_share=computing_share
        )

    base, ours = of("base"), of("ours")

    assert base["requests"] == ours["requests"] == 180
    assert ours["ttft_s"] < base["ttft_s"] / 5
    assert of("ours", 1.0)["latency_s"] > of("base", 1.0)["latency_s"]


def test_table_shows_each_row_beside_the_published_one() -> None:
    """The fitted row is named, and is not counted among those that fit."""
    row = {"latency_s": 369.08, "ttft_s": 297.26, "latency_s_p99": 789.27, "ttft_s_p99": 687.86}
    cells = {"1:4:base": row, "1:2:base": row}

    lines = table1.as_text(cells, 0).splitlines()

    assert [line for line in lines if line.endswith("fitted")] == [
        "    1   4  base      369.08 (369.08)     297.26 (297.26)     789.27 (789.27)"
        "     687.86 (687.86)  fitted"
    ]
    assert "    1   2  base      369.08 (146.15)" in lines[5]
    assert lines[7].startswith("base latency: 0 of 1 rows within 25 %")


def side(name: str, *replica_pages: int) -> replication.Side:
    latencies_s = [[1.0, 2.0] for _ in replica_pages]
    return replication.Side(name, latencies_s, [0.001] * len(replica_pages), [*replica_pages])


def test_replication_is_judged_by_the_latency_of_all_requests() -> None:
    """The change of the tail over all rounds, with the middle of what drawn rounds give."""
    off, on = [[1.0, 2.0], [1.0, 4.0]], [[1.0, 2.0], [2.0, 4.4]]

    latency = replication.changes(off, on)

    assert latency["p99"]["change"] == pytest.approx(0.1)
    assert latency["p99"]["interval"] == pytest.approx([0.0, 0.1])
    assert latency["mean"]["change"] == pytest.approx(9.4 / 8.0 - 1)
    found = replication.missed(latency, side("off", 0, 0), side("on", 4, 4))
    assert found == ["latency p99 +10.0%; bar +2.8%"]


def test_replicas_are_there_on_one_side_only() -> None:
    """Else the two sides are alike, whatever they cost."""
    latency = replication.changes([[1.0, 2.0]], [[1.0, 2.0]])

    assert replication.missed(latency, side("off", 0), side("on", 3)) == []
    assert replication.missed(latency, side("off", 2), side("on", 0)) == [
        "replicas in rounds without them: 2 pages",
        "a round with replicas that had none",
    ]
