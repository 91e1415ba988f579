"""The language of faults."""

from pathlib import Path
from typing import Any

import pytest

from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.replay.faults import FaultSchedule, load_faults, parse_faults

P0, D0, D1 = InstanceId("p0"), InstanceId("d0"), InstanceId("d1")
ROLES = {P0: Role.PREFILL, D0: Role.DECODE, D1: Role.DECODE}


def kill(when: dict[str, Any], whom: dict[str, Any]) -> dict[str, Any]:
    return {"when": when, "what": "kill", "whom": whom}


def hits(schedule: FaultSchedule, elapsed_s: float, sent: int, inflight: dict[InstanceId, int]) -> list[InstanceId]:
    return [due.whom for due in schedule.due(elapsed_s, sent, inflight, ROLES)]


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
        f"{path}: [1].when.moon: unknown key; allowed: after_requests, at_s, inflight_at_least",
        f"{path}: [1].what: got 'melt'; input should be 'kill'",
        f"{path}: [1].whom.role: got 'king'; input should be 'prefill', 'decode' or 'both'",
        f"{path}: [2].when: names no condition; allowed: at least one of at_s, after_requests, inflight_at_least",
        f"{path}: [2].whom: allowed: exactly one of id and role",
        f"{path}: [2].why: unknown key; allowed: what, when, whom",
        f"{path}: [3].whom: pick chooses within a role; allowed: only together with role",
        f"{path}: [4].when: missing",
        f"{path}: [4].whom: missing",
    ]


@pytest.mark.parametrize("text", ["", "kill: d0", "[]", "- [", "- 3", "- {when: {at_s: .nan}, what: kill, whom: {id: d}}"])
def test_a_file_that_is_no_list_of_faults_is_refused(tmp_path: Path, text: str) -> None:
    """Also an empty one: a run without faults is asked for by giving no file."""
    path = tmp_path / "f.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError):
        load_faults(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The reason comes from the system."""
    with pytest.raises(ConfigError, match="No such file"):
        load_faults(tmp_path / "absent.yaml")


def test_a_fault_is_due_once_when_its_time_has_come() -> None:
    """`at_s` counts from the start of the run."""
    schedule = FaultSchedule(parse_faults([kill({"at_s": 2}, {"id": "d0"})]), seed=0)

    assert hits(schedule, 1.9, 0, {D0: 0}) == []
    assert hits(schedule, 2.0, 0, {D0: 0}) == [D0]
    assert hits(schedule, 3.0, 0, {D0: 0}) == []
    assert schedule.pending == ()


def test_inflight_is_counted_at_the_victim() -> None:
    """Many streams elsewhere do not make a kill of d0 interesting."""
    schedule = FaultSchedule(parse_faults([kill({"inflight_at_least": 8}, {"id": "d0"})]), seed=0)

    assert hits(schedule, 0, 0, {D0: 7, D1: 50}) == []
    assert schedule.due(0, 0, {D0: 9, D1: 50}, ROLES)[0].inflight == 9


def test_all_named_conditions_must_hold() -> None:
    """A random moment with at least 8 victims is one fault with two conditions."""
    schedule = FaultSchedule(parse_faults([kill({"at_s": 1, "after_requests": 5, "inflight_at_least": 2}, {"id": "d0"})]), 0)

    assert hits(schedule, 1, 4, {D0: 2}) == []
    assert hits(schedule, 0, 5, {D0: 2}) == []
    assert hits(schedule, 1, 5, {D0: 1}) == []
    assert hits(schedule, 1, 5, {D0: 2}) == [D0]


def test_a_role_means_its_busiest_instance() -> None:
    """Without `pick` too; of equals the first by id, so that runs repeat."""
    fault = kill({"at_s": 0}, {"role": "decode", "pick": "busiest"})

    assert hits(FaultSchedule(parse_faults([fault]), 0), 0, 0, {P0: 9, D1: 3, D0: 1}) == [D1]
    assert hits(FaultSchedule(parse_faults([kill({"at_s": 0}, {"role": "decode"})]), 0), 0, 0, {D1: 3, D0: 3}) == [D0]


def test_a_random_pick_is_of_the_role_and_by_seed() -> None:
    """The same seed hits the same instance; over seeds every instance of the role is hit and no other."""
    faults = parse_faults([kill({"at_s": 0}, {"role": "decode", "pick": "random"})])

    def picked(seed: int) -> list[InstanceId]:
        return hits(FaultSchedule(faults, seed), 0, 0, {P0: 1, D0: 1, D1: 1})

    assert picked(4) == picked(4)
    assert {instance for seed in range(30) for instance in picked(seed)} == {D0, D1}


def test_two_faults_of_one_moment_have_two_victims() -> None:
    """An instance dies once; a fault whose victim is not up waits until it is."""
    schedule = FaultSchedule(parse_faults([kill({"at_s": 0}, {"role": "decode"})] * 3), seed=0)

    assert hits(schedule, 0, 0, {D0: 1, D1: 2}) == [D1, D0]
    assert hits(schedule, 1, 0, {}) == []
    assert hits(schedule, 2, 0, {D0: 0}) == [D0]
