"""`kvrs_lab.report.reasons`: sentences on why each option was chosen."""

from typing import Any

from kvrs_lab.report.reasons import reason_lines

PROCESS = {"what": "kill", "whom": "d0", "instances": ["d0"]}
NODE = {"what": "kill", "whom": "n1", "instances": ["agent-n1", "d1", "p1"]}


def row(option: str, costs_s: dict[str, float], **more: Any) -> dict[str, Any]:
    estimates = [{"option": each, "total_s": cost_s} for each, cost_s in costs_s.items()]
    return {"option": option, "from": "d0", "index": 0, "produced_tokens": 20} | {
        "estimates": estimates,
        **more,
    }


def test_a_choice_is_told_with_its_source_and_the_next_best_option() -> None:
    """Times are medians, and the length is that of the history."""
    rows = [
        row("restore", {"restore": 0.1, "recompute": 0.4, "migrate": 0.9}, source="agent-n1"),
        row("restore", {"restore": 0.2, "recompute": 0.5}, source="agent-n1", index=1),
    ]

    lines = reason_lines(rows, [0, 0], [PROCESS], {0: 100, 1: 1900})

    assert lines == [
        "kill d0: restore for 2 of 120 to 1,920 tokens: agent-n1 had a checkpoint; "
        "predicted 150 ms, recompute 450 ms."
    ]


def test_a_stream_of_which_no_kv_was_left_is_told_apart_from_one_whose_kv_was_far() -> None:
    """A recompute without another estimate was no choice; what died besides says why."""
    gone = row("recompute", {"recompute": 0.4}, **{"from": "d1"})
    far = row("recompute", {"recompute": 0.4, "migrate": 1.5}, **{"from": "d1"})

    (all_gone,) = reason_lines([gone], [0], [NODE], {})
    (one_gone,) = reason_lines([gone, far], [0, 0], [NODE], {})
    (near,) = reason_lines([far], [0], [NODE], {})

    assert "recompute for 1: there was no KV to fetch (agent-n1 and p1 died too);" in all_gone
    assert "recompute for 2: for 1 there was no KV to fetch (agent-n1 and p1 died too);" in one_gone
    assert one_gone.endswith("predicted 400 ms, migrate 1.50 s (for 1).")
    assert "to fetch KV was not predicted to cost less;" in near


def test_an_option_that_is_slower_alone_was_chosen_for_the_sake_of_other_victims() -> None:
    """The compared cost contains the time for which a stream keeps others waiting."""
    chosen = {"option": "migrate", "total_s": 0.3, "at_target_s": 0.01}
    other = {"option": "recompute", "total_s": 0.2, "at_target_s": 0.1}
    shared = row("migrate", {}, estimates=[chosen, other], others=7.0, source="p0")

    (told,) = reason_lines([shared], [0], [PROCESS], {})
    (alone,) = reason_lines([shared | {"others": 0.0}], [0], [PROCESS], {})
    there = [each | {"waiting": 7} for each in (chosen, other)]
    (single,) = reason_lines([shared | {"others": 0.0, "estimates": there}], [0], [PROCESS], {})

    assert told.endswith("slower alone for 1, but other streams wait less.")
    assert single.endswith("slower alone for 1, but other streams wait less.")
    assert "other streams" not in alone


def test_sentences_follow_the_faults_and_leave_out_recoveries_of_none() -> None:
    """A drain or an attempt that failed by itself has no fault."""
    rows = [row("recompute", {}), row("restore", {}), row("migrate", {})]

    lines = reason_lines(rows, [1, 0, None], [PROCESS, NODE], {})

    assert [line.split(" for ")[0] for line in lines] == ["kill d0: restore", "kill n1: recompute"]
