"""The fault language."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs_lab.faults.language import Phase, VictimRole, load_faults, parse_faults, phase_of
from kvrs_lab.faults.schedule import FaultSchedule, InstanceView

P0, D0, D1, A0, A1 = (InstanceId(name) for name in ("p0", "d0", "d1", "agent-n0", "agent-n1"))
N0, N1 = NodeId("n0"), NodeId("n1")
WHERE = {
    P0: (VictimRole.PREFILL, N0),
    D0: (VictimRole.DECODE, N0),
    D1: (VictimRole.DECODE, N1),
    A0: (VictimRole.AGENT, N0),
    A1: (VictimRole.AGENT, N1),
}


def kill(when: dict[str, Any], whom: dict[str, Any]) -> dict[str, Any]:
    return {"when": when, "what": "kill", "whom": whom}


def hits(
    schedule: FaultSchedule, elapsed_s: float, sent: int, inflight: dict[InstanceId, int]
) -> list[InstanceId]:
    return [name for due in schedule.due(elapsed_s, sent, up(inflight)) for name in due.instances]


def up(
    inflight: dict[InstanceId, int], phases: dict[InstanceId, dict[Phase, int]] | None = None
) -> dict[InstanceId, InstanceView]:
    """Streams of equal number and phase are the same one at all instances."""
    return {
        name: InstanceView(
            *WHERE[name], inflight=count, streams=streams_in((phases or {}).get(name, {}))
        )
        for name, count in inflight.items()
    }


def streams_in(phases: dict[Phase, int]) -> dict[StreamId, Phase]:
    return {
        StreamId(f"{phase} {number}"): phase
        for phase, count in phases.items()
        for number in range(count)
    }


def first(faults: list[dict[str, Any]]) -> FaultSchedule:
    return FaultSchedule(parse_faults(faults), 0, Random)


def test_every_mistake_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    """Path, value and what is allowed, as for the configuration."""
    path = tmp_path / "faults.yaml"
    path.write_text(
        "- {when: {at_s: -1}, what: kill, whom: {id: d0}}\n"
        "- {when: {at_s: 1, moon: full}, what: melt, whom: {role: king}}\n"
        "- {when: {}, what: kill, whom: {id: d0, role: decode}, why: fun}\n"
        "- {when: {at_s: 1}, what: kill, whom: {id: d0, pick: random}}\n"
        "- {what: kill}\n"
    )

    with pytest.raises(ConfigError) as caught:
        load_faults(path)

    assert caught.value.faults == [
        f"{path}: [0].when.at_s: got -1; input should be greater than or equal to 0",
        f"{path}: [1].when.moon: unknown key; "
        "allowed: after_requests, at_s, in_phase_at_least, inflight_at_least, phase, "
        "streams_at_least",
        f"{path}: [1].what: got 'melt'; input should be 'kill', 'lose_device', 'stop', 'slow', "
        f"'link_rate', 'link_cut' or 'corrupt_page'",
        f"{path}: [1].whom.role: got 'king'; input should be 'prefill', 'decode', 'both' "
        f"or 'agent'",
        f"{path}: [2].when: names no condition; "
        "allowed: at least one of at_s, after_requests, inflight_at_least, streams_at_least, phase",
        f"{path}: [2].whom: names id and role; allowed: exactly one of id, role, node "
        f"and link, or role and node together",
        f"{path}: [2].why: unknown key; allowed: bytes_per_s, factor, for_s, pages, "
        f"what, when, whom, workers",
        f"{path}: [3].whom: pick chooses within a role; allowed: only together with role",
        f"{path}: [4].when: missing",
        f"{path}: [4].whom: missing",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill: d0",
        "[]",
        "- [",
        "- 3",
        "- " + "[" * 5000,
        "- {when: {at_s: .nan}, what: kill, whom: {id: d}}",
    ],
)
def test_a_file_that_is_no_list_of_faults_is_refused(tmp_path: Path, text: str) -> None:
    """Also an empty one: a run without faults is asked for by giving no file."""
    path = tmp_path / "f.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError):
        load_faults(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file: got nothing; allowed: a list of faults"),
        ("kill: d0", "the file: got a section; allowed: a list of faults"),
        ("- 3", "[0]: got 3; allowed: a section"),
        ("- {when: 3, what: kill, whom: {id: d0}}", "[0].when: got 3; allowed: a section"),
    ],
)
def test_a_wrong_shape_is_named_in_terms_of_the_file(
    tmp_path: Path, text: str, reason: str
) -> None:
    """Messages use the terms of YAML (list, section), not the classes of the parser."""
    path = tmp_path / "f.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_faults(path)

    assert caught.value.faults == [f"{path}: {reason}"]


def test_a_fault_has_a_label_for_people() -> None:
    """The label says what, whom and when, as the file named them."""
    (kill_later, cut) = parse_faults(
        [
            kill({"at_s": 9, "inflight_at_least": 8}, {"role": "decode"}),
            {
                "when": {"phase": "handoff"},
                "what": "link_cut",
                "for_s": 1,
                "whom": {"link": ["n0", "n1"]},
            },
        ]
    )

    assert kill_later.label == "kill decode (at_s 9.0, inflight_at_least 8)"
    assert cut.label == "link cut n0-n1 (phase handoff)"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The reason comes from the system."""
    with pytest.raises(ConfigError, match="No such file"):
        load_faults(tmp_path / "absent.yaml")


def test_a_fault_is_due_once_when_its_time_has_come() -> None:
    """`at_s` counts from the start of the run."""
    schedule = FaultSchedule(parse_faults([kill({"at_s": 2}, {"id": "d0"})]), 0, Random)

    assert hits(schedule, 1.9, 0, {D0: 0}) == []
    assert hits(schedule, 2.0, 0, {D0: 0}) == [D0]
    assert hits(schedule, 3.0, 0, {D0: 0}) == []
    assert schedule.pending == ()


def test_inflight_is_counted_at_the_victim() -> None:
    """Many streams elsewhere do not make a kill of d0 interesting."""
    schedule = FaultSchedule(
        parse_faults([kill({"inflight_at_least": 8}, {"id": "d0"})]), 0, Random
    )

    assert hits(schedule, 0, 0, {D0: 7, D1: 50}) == []
    assert schedule.due(0, 0, up({D0: 9, D1: 50}))[0].inflight == 9


def test_all_named_conditions_must_hold() -> None:
    """A random moment with at least 8 victims is one fault with two conditions."""
    schedule = FaultSchedule(
        parse_faults(
            [kill({"at_s": 1, "after_requests": 5, "inflight_at_least": 2}, {"id": "d0"})]
        ),
        0,
        Random,
    )

    assert hits(schedule, 1, 4, {D0: 2}) == []
    assert hits(schedule, 0, 5, {D0: 2}) == []
    assert hits(schedule, 1, 5, {D0: 1}) == []
    assert hits(schedule, 1, 5, {D0: 2}) == [D0]


def test_a_role_means_its_busiest_instance() -> None:
    """Without `pick` too; of equals the first by id, so that runs repeat."""
    fault = kill({"at_s": 0}, {"role": "decode", "pick": "busiest"})

    assert hits(FaultSchedule(parse_faults([fault]), 0, Random), 0, 0, {P0: 9, D1: 3, D0: 1}) == [
        D1
    ]
    assert hits(
        FaultSchedule(parse_faults([kill({"at_s": 0}, {"role": "decode"})]), 0, Random),
        0,
        0,
        {D1: 3, D0: 3},
    ) == [D0]


def test_a_random_pick_is_of_the_role_and_by_seed() -> None:
    """The same seed hits the same instance; over seeds every instance of the role is hit and no
    other.
    """
    faults = parse_faults([kill({"at_s": 0}, {"role": "decode", "pick": "random"})])

    def picked(seed: int) -> list[InstanceId]:
        return hits(FaultSchedule(faults, seed, Random), 0, 0, {P0: 1, D0: 1, D1: 1})

    assert picked(4) == picked(4)
    assert {instance for seed in range(30) for instance in picked(seed)} == {D0, D1}


def test_two_faults_of_one_moment_have_two_victims() -> None:
    """An instance dies once; a fault whose victim is not up waits until it is."""
    schedule = FaultSchedule(parse_faults([kill({"at_s": 0}, {"role": "decode"})] * 3), 0, Random)

    assert hits(schedule, 0, 0, {D0: 1, D1: 2}) == [D1, D0]
    assert hits(schedule, 1, 0, {}) == []
    assert hits(schedule, 2, 0, {D0: 0}) == [D0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"what": "kill", "whom": {"node": "n0", "rank": 1}}, "allowed: only together with id or"),
        ({"what": "kill", "whom": {"role": "agent", "rank": 1}}, "allowed: no agent"),
        ({"what": "lose_device", "whom": {"node": "n0"}}, "lose_device hits an instance"),
        (
            {"what": "corrupt_page", "pages": 1, "whom": {"id": "d0", "rank": 1}},
            "allowed with rank: kill, lose_device, stop, slow, without workers",
        ),
        ({"what": "kill", "whom": {"node": "n0", "stage": 1}}, "stage is one of an instance's"),
        ({"what": "kill", "whom": {"role": "agent", "stage": 1}}, "allowed: no agent"),
        (
            {"what": "kill", "whom": {"id": "d0", "stage": 1, "rank": 1}},
            "names a rank and a stage; allowed: one of them",
        ),
        (
            {"what": "lose_device", "whom": {"id": "d0", "stage": 1}},
            "allowed with stage: kill, stop, slow, without workers",
        ),
        (
            {"what": "kill", "workers": 1, "whom": {"id": "d0", "stage": 1}},
            "allowed with stage: kill, stop, slow, without workers",
        ),
        (
            {"what": "stop", "whom": {"id": "d0"}},
            "stop got the parameters: none; allowed: exactly for_s",
        ),
        (
            {"what": "kill", "for_s": 1, "whom": {"id": "d0"}},
            "kill got the parameters: for_s; allowed: exactly none",
        ),
        (
            {"what": "slow", "for_s": 1, "factor": 1, "whom": {"id": "d0"}},
            "[0].factor: got 1; input should be greater than 1",
        ),
        (
            {"what": "link_cut", "for_s": 1, "whom": {"id": "d0"}},
            "link_cut hits the link of two nodes",
        ),
        ({"what": "kill", "whom": {"link": ["n0", "n1"]}}, "kill hits instances, not a link"),
        (
            {"what": "link_cut", "for_s": 1, "whom": {"link": ["n0", "n0"]}},
            "'n0' twice; allowed: two different nodes",
        ),
        ({"what": "link_cut", "for_s": 1, "whom": {"link": ["n0"]}}, "[0].whom.link: got a list"),
        (
            {"what": "kill", "whom": {"role": "decode", "seed": 1}},
            "only together with pick: random",
        ),
    ],
)
def test_a_fault_has_exactly_its_own_parameters_and_kind_of_victim(
    fault: dict[str, Any], reason: str
) -> None:
    """Nothing is silently ignored, and nothing is left to a default that a reader would have to
    know.
    """
    with pytest.raises(ConfigError) as caught:
        parse_faults([{"when": {"at_s": 0}} | fault])

    assert len(caught.value.faults) == 1
    assert reason in str(caught.value)


def test_a_count_of_streams_needs_the_phase_that_it_counts() -> None:
    """`in_phase_at_least` alone would be a condition without effect."""
    with pytest.raises(ConfigError, match="only together with phase"):
        parse_faults([kill({"at_s": 1, "in_phase_at_least": 2}, {"id": "d0"})])


def test_the_phase_of_a_stream_follows_from_its_stage_and_its_tokens() -> None:
    """Hand-off ends with the first token; the end is near from 8 tokens before it."""
    assert phase_of("prefill", 0, 100) is Phase.PREFILL
    assert phase_of("decode", 0, 100) is Phase.HANDOFF
    assert [phase_of("decode", output, 100) for output in (1, 91)] == [Phase.DECODE] * 2
    assert phase_of("decode", 92, 100) is Phase.NEAR_END
    assert phase_of("waiting", 5, 100) is None


def test_a_recovery_lasts_until_the_first_token_of_the_next_instance() -> None:
    """Whatever was produced before, and whether KV is moved or computed; a waiting stream depends
    on no instance.
    """
    assert [phase_of(stage, 50, 100, recovers=True) for stage in ("prefill", "decode")] == [
        Phase.RECOVERY
    ] * 2
    assert phase_of("waiting", 50, 100, recovers=True) is None


def test_a_phase_waits_for_enough_streams_of_the_victim_in_it() -> None:
    """The hand-off is short: one asks for the moment itself and not for a time at which it might
    be.
    """
    schedule = first([kill({"phase": "handoff", "in_phase_at_least": 2}, {"role": "decode"})])

    assert (
        schedule.due(
            0,
            0,
            up({D0: 9, D1: 9}, {D0: {Phase.HANDOFF: 1, Phase.DECODE: 8}, D1: {Phase.HANDOFF: 1}}),
        )
        == []
    )
    assert schedule.due(0, 0, up({D0: 9, D1: 3}, {D1: {Phase.HANDOFF: 2}}))[0].instances == (D1,)


def test_a_node_is_hit_as_a_whole_and_its_streams_count_together() -> None:
    """A host takes all of its instances with it; together with a role, one of them is chosen within
    the node.
    """
    whole = first([kill({"inflight_at_least": 5}, {"node": "n0"})])
    one = first([kill({"at_s": 0}, {"node": "n0", "role": "decode"})])

    assert whole.due(0, 0, up({P0: 1, D0: 3, D1: 9})) == []
    (due,) = whole.due(0, 0, up({P0: 2, D0: 3, D1: 9}))
    assert (due.whom, due.instances, due.inflight) == ("n0", (D0, P0), 5)
    assert hits(one, 0, 0, {P0: 2, D0: 3, D1: 9}) == [D0]


def test_a_link_fault_reaches_both_ends_and_waits_until_both_are_up() -> None:
    """Each end limits what it sends; with one end down there is no link to hurt. It does not spare
    those it touches.
    """
    cut = {"when": {"at_s": 0}, "what": "link_cut", "for_s": 2, "whom": {"link": ["n0", "n1"]}}
    schedule = first([cut, kill({"at_s": 0}, {"id": "d1"})])

    assert schedule.due(0, 0, up({P0: 1, D0: 1})) == []
    cut_due, kill_due = schedule.due(0, 0, up({P0: 1, D0: 1, D1: 1}))
    assert (cut_due.whom, cut_due.instances) == ("n0-n1", (D0, D1, P0))
    assert kill_due.instances == (D1,)


def test_a_fault_may_bring_the_seed_of_its_own_pick() -> None:
    """Then its victim is the same whatever the seed of the run."""
    faults = parse_faults([kill({"at_s": 0}, {"role": "decode", "pick": "random", "seed": 5})])

    assert (
        len(
            {
                tuple(hits(FaultSchedule(faults, seed, Random), 0, 0, {D0: 1, D1: 1}))
                for seed in range(20)
            }
        )
        == 1
    )


def test_an_agent_is_hit_as_a_role_and_never_as_an_instance() -> None:
    """An instance of both roles is meant by either of them, but it is no agent."""
    both = InstanceId("b0")
    views = up({P0: 9, D0: 9, A0: 1, A1: 2}) | {
        both: InstanceView(VictimRole.BOTH, N0, inflight=50)
    }

    def victim(role: str) -> str:
        (due,) = first([kill({"at_s": 0}, {"role": role})]).due(0, 0, views)
        return due.whom

    assert [victim(role) for role in ("agent", "decode", "prefill")] == [A1, both, both]


def test_a_node_takes_its_agent_along() -> None:
    """A dead host takes everything with it; a role within it means only one of them."""
    whole = first([kill({"at_s": 0}, {"node": "n0"})])
    agent = first([kill({"at_s": 0}, {"node": "n0", "role": "agent"})])
    all_up = dict.fromkeys(WHERE, 1)

    assert hits(whole, 0, 0, all_up) == [A0, D0, P0]
    assert hits(agent, 0, 0, all_up) == [A0]


def test_a_whole_role_is_hit_at_once() -> None:
    """One event: all that are up, those of one node if it is given, and none that another fault of
    the same moment hits.
    """
    all_decode = first([kill({"inflight_at_least": 5}, {"role": "decode", "pick": "all"})])
    both_faults = first(
        [kill({"at_s": 0}, {"id": "d0"}), kill({"at_s": 0}, {"role": "decode", "pick": "all"})]
    )
    of_node = first([kill({"at_s": 0}, {"role": "decode", "pick": "all", "node": "n1"})])

    assert all_decode.due(0, 0, up({P0: 9, D0: 1, D1: 3})) == []
    (due,) = all_decode.due(0, 0, up({P0: 9, D0: 2, D1: 3}))
    assert (due.whom, due.instances, due.inflight) == ("all decode", (D0, D1), 5)
    assert hits(both_faults, 0, 0, {D0: 1, D1: 1}) == [D0, D1]
    assert hits(of_node, 0, 0, {D0: 1, D1: 1}) == [D1]


def test_streams_that_count_on_a_victim_are_counted_once() -> None:
    """Prefill keeps the pages of a stream that decode works on: a node that has both has one
    stream.
    """
    at_both = {P0: {Phase.DECODE: 5, Phase.PREFILL: 1}, D0: {Phase.DECODE: 5}}

    def due_at(count: int) -> int:
        return len(
            first([kill({"streams_at_least": count}, {"node": "n0"})]).due(
                0, 0, up({P0: 1, D0: 5}, at_both)
            )
        )

    assert (due_at(6), due_at(7)) == (1, 0)
    (due,) = first([kill({"phase": "decode", "in_phase_at_least": 5}, {"node": "n0"})]).due(
        0, 0, up({P0: 1, D0: 5}, at_both)
    )
    assert len(due.streams) == 6


def test_a_schedule_wants_no_look_before_any_time_has_come() -> None:
    """To ask a busy proxy fifty times a second how it is would cost more than the faults."""
    schedule = first(
        [
            kill({"at_s": 5, "inflight_at_least": 1}, {"id": "d0"}),
            kill({"after_requests": 3}, {"id": "d1"}),
        ]
    )

    assert [schedule.needs_load(*at) for at in ((1, 2), (1, 3), (5, 0))] == [False, True, True]
    assert not FaultSchedule([], 0, Random).needs_load(9, 9)


def test_a_kill_may_be_of_some_workers_only() -> None:
    """Faults that are no kills take no number of workers."""
    (fault,) = parse_faults(
        [{"when": {"at_s": 1}, "what": "kill", "whom": {"id": "d0"}, "workers": 1}]
    )
    assert fault.workers == 1

    with pytest.raises(ConfigError, match="stop got the parameters: for_s, workers"):
        parse_faults(
            [{"when": {"at_s": 1}, "what": "stop", "for_s": 1, "whom": {"id": "d0"}, "workers": 1}]
        )


def test_a_rank_is_hit_where_there_is_one() -> None:
    """By its number, or drawn; an instance without that rank is not hit, and a fault whose rank is
    gone waits.
    """
    ranked = InstanceView(VictimRole.DECODE, N0, ranks=(0, 2))
    faults = [
        {"when": {"at_s": 0}, "what": "lose_device", "whom": {"role": "decode", "rank": 2}},
        kill({"at_s": 0}, {"id": "d1", "rank": "random"}),
        kill({"at_s": 0}, {"id": "d1", "rank": 1}),
    ]
    schedule = first(faults)

    due = schedule.due(0, 0, {D0: InstanceView(VictimRole.DECODE, N0), InstanceId("d1"): ranked})
    again = schedule.due(0, 0, {InstanceId("d1"): ranked})

    assert [(one.fault.what, one.ranks) for one in due] == [("lose_device", {"d1": 2})]
    ((name, rank),) = again[0].ranks.items()
    assert (name, rank in (0, 2), len(again)) == ("d1", True, 1)
    assert [fault.label for fault in schedule.pending] == ["kill d1 rank 1 (at_s 0.0)"]


def test_a_stage_is_hit_where_it_is_in_a_host() -> None:
    """By its number, or drawn; a fault waits while no host has the stage."""
    divided = InstanceView(VictimRole.DECODE, N0, ranks=(0, 1, 2), stages=(1, 2))
    faults = [
        kill({"at_s": 0}, {"role": "decode", "stage": 2}),
        kill({"at_s": 0}, {"id": "d1", "stage": "random"}),
        kill({"at_s": 0}, {"id": "d1", "stage": 0}),
    ]
    schedule = first(faults)

    due = schedule.due(0, 0, {D0: InstanceView(VictimRole.DECODE, N0), InstanceId("d1"): divided})
    again = schedule.due(0, 0, {InstanceId("d1"): divided})

    assert [(one.stages, one.ranks) for one in due] == [({"d1": 2}, {})]
    ((name, stage),) = again[0].stages.items()
    assert (name, stage in (1, 2), len(again)) == ("d1", True, 1)
    assert [fault.label for fault in schedule.pending] == ["kill d1 stage 0 (at_s 0.0)"]


def test_text_that_is_not_yaml_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("- {when: {at_s: 1}}\n- {what: [\n")

    with pytest.raises(ConfigError, match=r"faults\.yaml:3: not valid YAML: ") as raised:
        load_faults(path)

    assert "unicode string" not in str(raised.value)
