"""Pages of transfers that outlive their request: versions that keep them, and instances that are
spared meanwhile.
"""

from collections.abc import Sequence

import pytest

from kvrs.config.cluster import Backend
from kvrs.core.fleet.tested import aborted_transfers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.member import TRANSFER_S
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.rows import HOLDS_ABORTED, RegionInfo, RegionReport
from tests.core.policy_harness import PolicyHarness, only

SGLANG, VLLM = Backend.SGLANG, Backend.VLLM


@pytest.mark.parametrize(
    ("engine", "version", "ranks", "are_held"),
    [
        (SGLANG, "0.5.23", (), True),
        (SGLANG, "0.5.23.post1", (), True),
        (SGLANG, "0.6", (), True),
        (SGLANG, "0.5.22", (), False),
        (SGLANG, "0.4.99", (), False),
        (SGLANG, "main", (), None),
        (SGLANG, None, (), None),
        (VLLM, "0.32.0", (2, 1), True),
        (VLLM, "1.0.0", (None, 1), True),
        (VLLM, "0.31.2", (2, 2, 2), True),
        (VLLM, "0.31.2", (2, 1), False),
        (VLLM, "0.31.2", (2, None), None),
        (VLLM, "dev", (1, 1), None),
    ],
)
def test_versions_that_keep_pages_of_aborted_transfers(
    engine: Backend, version: str | None, ranks: Sequence[int | None], are_held: bool | None
) -> None:
    """A version that is not known is not taken for safe."""
    found = aborted_transfers(engine, version, shown=None, ranks=ranks)

    assert found is not None
    assert found.are_held is are_held
    assert bool(found.cause) is not are_held or are_held is None


@pytest.mark.parametrize("shown", [True, False])
def test_what_is_seen_in_the_process_outranks_its_version(shown: bool) -> None:
    """A version before the default may have it on, and a later one off."""
    for version in ("0.5.22", "0.5.23"):
        found = aborted_transfers(SGLANG, version, shown=shown, ranks=())

        assert found is not None
        assert found.are_held is shown


def test_engines_of_kvrs_are_not_judged() -> None:
    assert aborted_transfers(Backend.EMBEDDED, None, shown=None, ranks=()) is None


@pytest.mark.parametrize("told", [True, False, None, "yes"])
def test_an_agents_report_tells_what_the_plug_in_sees(told: object) -> None:
    """It is no part of the namespace, and nothing but a truth value is believed."""
    fields = {} if told is None else {HOLDS_ABORTED: told}
    info = RegionInfo("d0", bytes(8), 1, 1, fields)

    expected = told if isinstance(told, bool) else None
    assert RegionReport.of(info, is_alive=True).holds_aborted is expected


def hang(harness: PolicyHarness, name: str, epoch: int = 1) -> None:
    harness.handle(ev.TransferHung(InstanceId(name), epoch))


def targets_of_new(harness: PolicyHarness, names: str) -> set[str]:
    """The decode instances that new streams of these names are sent to, which run on."""
    return {
        only(harness.handle(ev.StreamArrived(StreamId(name), 20)), act.Start).plan.decode
        for name in names
    }


def test_an_instance_whose_transfer_hangs_gets_streams_only_if_nothing_else_decodes() -> None:
    """For TRANSFER_S."""
    harness = PolicyHarness("p2", "d0", "d1")
    hang(harness, "d0")

    assert targets_of_new(harness, "abcd") == {"d1"}

    hang(harness, "d1")
    assert targets_of_new(harness, "efghijklmn") == {"d0", "d1"}

    harness.now_s += TRANSFER_S
    assert targets_of_new(harness, "opqr") == {"d0", "d1"}


def test_a_victim_is_not_recovered_where_a_transfer_hangs() -> None:
    harness = PolicyHarness("p3", "d0", "d1", "d2")
    plan = harness.decoding("s", 400).plan
    others = {"d0", "d1", "d2"} - {plan.decode}
    hung, free = sorted(others)
    hang(harness, hung)

    recovered = only(harness.lose(plan.decode, s=7), act.Start)

    assert recovered.plan.decode == free


def test_a_transfer_of_a_former_process_says_nothing_of_the_present_one() -> None:
    harness = PolicyHarness("p2", "d0", "d1")
    hang(harness, "d0", epoch=0)

    assert targets_of_new(harness, "abcd") == {"d0", "d1"}
