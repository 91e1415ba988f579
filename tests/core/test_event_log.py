"""An incident, written down and run again."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from math import inf
from types import MappingProxyType
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicyName, PolicySettings, RecoverySettings, SloSettings
from kvrs.core.event_log import Header, LogEntry, event_line, header_line, read, rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.errors import LogError
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, LoadReport, ModelNames, ReformingReport
from kvrs_testkit.examples import examples
from tests.core.policy_harness import instance_up
from tests.core.recorded_incident import BACKUP, Rough, incident

POLICY, SLO = PolicySettings(), SloSettings()
HEADER = header_line(POLICY, SLO, BACKUP)
A = StreamId("A")

seconds = st.floats(0, 1e6)
sizes = st.integers(1, 4096)


@st.composite
def tables(draw: st.DrawFn) -> PrefillTable:
    """In one dimension or in two, with dips."""
    if draw(st.booleans()):
        return PrefillTable(
            draw(st.text()),
            draw(st.text()),
            draw(sizes),
            draw(st.lists(seconds, min_size=2)),
            draw(st.integers(0, 100)),
            draw(st.none() | sizes),
            is_guess=draw(st.booleans()),
            is_estimated=draw(st.booleans()),
        )
    width = draw(st.integers(2, 5))
    rows = draw(st.lists(st.lists(seconds, min_size=width, max_size=width), min_size=2, max_size=4))
    return PrefillTable.from_grid(
        draw(st.text()), draw(st.text()), PrefixGrid(draw(sizes), draw(sizes), rows)
    )


ups = st.builds(
    instance_up,
    st.sampled_from(["p0", "d1", "b2"]),
    geometry=st.builds(
        KvGeometry,
        layers=sizes,
        kv_heads=sizes,
        head_dim=sizes,
        dtype_bytes=st.integers(1, 8),
        page_size_tokens=sizes,
    ),
    prefill=st.none() | tables(),
    capabilities=st.lists(st.sampled_from(Capability)),
    own_prefill=st.none() | st.just(InstanceId("p9")),
    moves_kv=st.booleans(),
    tokens=st.text(),
    computes_prompts=st.booleans(),
    max_model_len=st.integers(0, 1 << 24),
    step_tokens=st.integers(0, 1 << 24),
)
counts = st.dictionaries(st.text(), st.integers())
produced = {"produced_tokens": counts}
naturals = st.integers(0, 1 << 53)
page_counts = st.dictionaries(st.text(), naturals)
reformings = st.builds(
    ReformingReport,
    number=naturals,
    ready_in_s=seconds,
    degree=naturals,
    lost=st.lists(naturals),
    move_bytes=naturals,
    missing_pages=page_counts,
    decode_factor=st.floats(1e-9, 1e9),
)
reports = st.builds(
    LoadReport,
    *[naturals] * 4,
    seconds,
    st.just([]),
    damaged_pages=naturals,
    kv_bytes=page_counts,
    draining=st.booleans(),
    reforming=st.none() | reformings,
    full_degree=naturals,
    names=st.none() | st.just(ModelNames(("tiny",))),
    step_s=st.floats(0, 86_400),
    slowness=st.none() | st.floats(0.001, 1000),
)
mappings: dict[Any, dict[str, Any]] = {
    ev.InstanceLost: produced,
    ev.GpuJudged: produced,
    ev.DrainOrdered: produced,
    ev.LoadReported: {"report": reports} | produced,
    ev.InstanceRemoved: produced,
    ev.CheckpointsReported: {"pages": counts},
    ev.PagesKept: {"pages": counts},
    ev.SettingsReloaded: {
        "policy": st.builds(
            PolicySettings,
            name=st.sampled_from(PolicyName),
            slot_lease_s=st.floats(1, 10),
            recovery=st.builds(RecoverySettings, wait_s=st.floats(0, 3600)),
        ),
        "slo": st.builds(SloSettings, ttft_s=st.none() | st.floats(1e-9, 86400)),
    },
}
EVENTS = [kind for kind in get_args(ev.Event) if kind is not ev.InstanceUp]


def entry_of(event: ev.Event, answer: Sequence[act.Action], now_s: float = 1.5) -> LogEntry:
    """The entry that is read from one line, under a header."""
    _, entry = read([HEADER, event_line(now_s, event, answer)])
    assert isinstance(entry, LogEntry)
    return entry


@pytest.mark.parametrize("kind", EVENTS)
@given(data=st.data(), now_s=st.floats())
@examples(20)
def test_every_event_comes_back_exactly(kind: Any, data: st.DataObject, now_s: float) -> None:
    """Floats to the last bit, also those that are no numbers; any text, any order of a mapping."""
    event = data.draw(st.builds(kind, **mappings.get(kind, {})))

    found = entry_of(event, [], now_s)

    assert repr((found.now_s, found.event)) == repr((now_s, event))


@pytest.mark.parametrize("kind", get_args(act.Action))
@given(data=st.data())
@examples(20)
def test_every_action_comes_back_exactly(kind: Any, data: st.DataObject) -> None:
    """With every plan and estimate in it."""
    answer = data.draw(st.lists(st.builds(kind), min_size=1, max_size=3))

    assert repr(entry_of(ev.TimerFired(), answer).actions) == repr(tuple(answer))


@given(ups)
@settings(deadline=None)
def test_an_instance_comes_back_with_its_table(up: ev.InstanceUp) -> None:
    """The table gives the same times everywhere: what it works out for itself is worked out again
    from the same numbers.
    """
    found = entry_of(up, []).event

    assert isinstance(found, ev.InstanceUp)
    assert found == up
    if found.prefill is None or up.prefill is None:
        return
    for name in ("_levelled", "_slopes", "_linear", "_quadratic", "_last_tokens"):
        assert repr(getattr(found.prefill, name)) == repr(getattr(up.prefill, name))
    for prefix, new in ((0, 1), (17, 300), (100_000, 7)):
        assert repr(found.prefill.extra(prefix, new)) == repr(up.prefill.extra(prefix, new))


@given(
    st.builds(PolicySettings, name=st.sampled_from(PolicyName), slot_lease_s=st.floats(1, 10)),
    st.builds(SloSettings, abort=st.booleans()),
)
@settings(deadline=None)
def test_the_settings_come_back(policy: PolicySettings, slo: SloSettings) -> None:
    """Also those of another part."""
    backup = BackupSettings(mode=BackupMode.REMOTE, alpha=0.1)

    assert [*read([header_line(policy, slo, backup, part=3)])] == [Header(policy, slo, backup, 3)]


def test_a_line_is_one_line_whatever_the_text_of_a_cause() -> None:
    """And plain ASCII, so that nothing on the way can change it; whatever kind of mapping a driver
    hands over.
    """
    line = event_line(
        0.1,
        ev.InstanceLost(InstanceId("d0"), 1, "first\nsecond\u2028", MappingProxyType({A: 3})),
        [act.WakeAt(inf)],
    )

    assert line.isascii()
    assert len(line.splitlines()) == 1
    _, entry = read([HEADER, line])
    assert isinstance(entry, LogEntry)
    assert entry.event == ev.InstanceLost(InstanceId("d0"), 1, "first\nsecond\u2028", {A: 3})


def test_an_incident_run_again_gives_the_same_actions() -> None:
    """Through a fresh policy, with the recorded times."""
    lines = incident()

    found = rerun(lines)

    assert found.difference is None
    assert found.lines == len(lines)
    assert found.counts["InstanceUp"] == 4
    assert (found.counts["Start"], found.counts["Recovered"], found.counts["Settled"]) == (5, 3, 2)


@given(st.integers(0, 1 << 32))
@examples(15)
def test_any_incident_run_again_gives_the_same_actions(seed: int) -> None:
    """Whatever comes and goes, under any settings."""
    lines = Rough(seed).run(200)

    assert rerun(lines).difference is None


@pytest.mark.process
def test_another_process_does_the_same() -> None:
    """Where sets of names have another order: nothing may depend on it, not even the last bit of a
    sum.
    """
    command = [sys.executable, "-m", "tests.core.recorded_incident", "7", "400"]

    one, other = (
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    )

    assert one == other
    assert rerun(one.splitlines()).difference is None


def test_the_rough_incidents_are_rough_enough() -> None:
    """Every event and action occurs in the logs of the tests above."""
    counts: Counter[str] = Counter()
    for seed in range(12):
        counts.update(rerun(Rough(seed).run(300)).counts)

    assert (
        min(counts[kind.__name__] for kind in (*get_args(ev.Event), *get_args(act.Action))) > 5
    ), counts


def test_the_first_difference_is_named() -> None:
    """Another policy decides otherwise; the first such line is named."""
    lines = incident()
    never = header_line(PolicySettings(name=PolicyName.ALWAYS_RECOMPUTE), SLO, BACKUP)
    found = rerun([never, *lines[1:]])

    assert found.difference is not None
    line = lines[found.difference.entry.line - 1]
    assert '"kind": "Recovered"' in line
    assert found.lines == found.difference.entry.line
    assert found.difference.again != found.difference.entry.actions


@pytest.mark.parametrize("changed", ['"attempt": 2', '"at_s": '])
def test_a_log_that_was_tampered_with_differs(changed: str) -> None:
    """A number in a recorded action."""
    lines = incident()
    number = max(n for n, line in enumerate(lines) if changed in line and '"kind": "Start"' in line)
    lines[number] = lines[number].replace(
        changed, changed[:-1] + "93" if changed[-1] == "2" else changed + "9"
    )

    found = rerun(lines)

    assert found.difference is not None
    assert found.difference.entry.line >= number + 1


def test_a_log_goes_on_in_its_next_part_and_begins_anew_with_another_proxy() -> None:
    """Parts are read one after another from part 1 on; the policy's state goes on from one to the
    next.
    """
    lines = incident()
    split = [*lines[:9], header_line(POLICY, SLO, BACKUP, part=2), *lines[9:]]

    assert rerun(split).difference is None
    assert rerun([*split, *lines]).counts["InstanceUp"] == 8


@pytest.mark.parametrize("parts", [[2], [1, 3], [1, 2, 2], []])
def test_a_log_that_lacks_a_part_is_refused(parts: list[int]) -> None:
    """From its middle on it would differ for no reason but that."""
    with pytest.raises(LogError, match=rf"^line {max(1, len(parts))}: .*; allowed: "):
        rerun([header_line(POLICY, SLO, BACKUP, part=part) for part in parts])


GOOD = event_line(
    1.0,
    instance_up("d0", prefill=PrefillTable.from_grid("t", "s", PrefixGrid(1, 1, [[0, 1], [2, 3]]))),
    [],
)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "not JSON: Expecting value at character 0"),
        ("[]", "Expected `object`"),
        ("[" * 100_000, "recursion"),
        (GOOD[:-5], "not JSON: Expecting ':' delimiter"),
        (
            GOOD.replace("InstanceUp", "InstanceDown"),
            "Invalid value 'InstanceDown' - at `$.event.kind`",
        ),
        (GOOD.replace('"step_tokens": 1,', '"step_tokens": 0,'), "prefill.step_tokens"),
        (GOOD.replace('"rows": [[0, 1]', '"rows": [[0, 1, 2]'), "rows of different lengths"),
        (GOOD.replace('"seconds": [0, 1]', '"seconds": [0]'), "prefill.seconds"),
        (GOOD.replace('"role": "decode"', '"role": "dancer"'), "role"),
        (GOOD.replace('"at_s": 1.0', '"at_s": "now"'), "at_s"),
        (GOOD.replace('"at_s": 1.0', '"at_s": NaN'), "at_s"),
        (GOOD.replace('"at_s": 1.0', '"at_s": Infinity'), "at_s"),
        (GOOD.replace('"at_s": 1.0', '"at_s": 1e300'), "at_s"),
        (
            GOOD.replace('"actions": []', '"actions": [{"kind": "Stop"}]'),
            "Invalid value 'Stop' - at `$.actions[0].kind`",
        ),
        (GOOD.replace('"actions": []', '"actions": [{"kind": "WakeAt"}]'), "at_s"),
        (
            HEADER.replace('"kvrs_event_log": 2', '"kvrs_event_log": 99'),
            "kvrs_event_log: got 99; allowed: 2",
        ),
        (HEADER.replace('"slots_max": 32', '"slots_max": 0'), "slots_max: got 0"),
        (HEADER.replace('"part": 1', '"part": 0'), "`int` >= 1 - at `$.part`"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str) -> None:
    """Its number, what is wrong, what is allowed: no traceback, whatever a file holds."""
    assert line not in (GOOD, HEADER), "the case must change something"

    with pytest.raises(LogError, match=r"^line 3: ") as refused:
        rerun([HEADER, GOOD, line])

    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_log_without_its_header_is_refused() -> None:
    """Without the settings nothing can be decided again."""
    with pytest.raises(LogError, match=r"^line 1: no header"):
        rerun([GOOD])


def test_a_log_of_another_version_names_the_setting_that_is_not_known_here() -> None:
    """Such a log had been decided by it, and that version reads it."""
    first, *lines = incident()
    header = json.loads(first)
    header["policy"]["foresight"] = 2.0

    with pytest.raises(LogError) as refused:
        rerun([json.dumps(header), *lines])

    said = "line 1: policy.foresight: got 2.0; the version of kvrs that wrote this log knows it"
    assert str(refused.value).startswith(said)


def test_an_event_on_which_the_policy_fails_is_named_too() -> None:
    """Its arithmetic holds for events of drivers, not for any text in a file."""
    up = [event_line(0.0, instance_up("b0"), [])]
    asked = event_line(1.0, ev.StreamArrived(A, 10**400), [])

    with pytest.raises(LogError, match=r"^line 3: the policy fails on it: OverflowError"):
        rerun([HEADER, *up, asked])
