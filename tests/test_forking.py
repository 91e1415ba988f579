"""Branches of one state in child processes, and the figures of LUMEN's schemes by them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from experiments.forking import in_children
from experiments.lumen import simulated as lumen


@pytest.mark.process
def test_each_branch_begins_with_the_state_as_it_was() -> None:
    """The others do not see what one does, nor does the process that they branch off."""
    state = [0]

    def count(more: int) -> list[int]:
        state.append(more)
        return state

    found = list(in_children([partial(count, more) for more in (1, 2, 3)], jobs=2))

    assert found == [[0, 1], [0, 2], [0, 3]]
    assert state == [0]


def violated() -> None:
    raise AssertionError("a stream ends twice")


def ended() -> None:
    raise SystemExit(3)


@pytest.mark.process
@pytest.mark.parametrize(
    ("branch", "said"), [(violated, "a stream ends twice"), (ended, "without an answer")]
)
def test_a_branch_that_fails_is_no_result(branch: Callable[[], None], said: str) -> None:
    """A violated invariant is raised here, in its words."""
    with pytest.raises(AssertionError, match=said):
        list(in_children([branch]))


@pytest.mark.process
def test_schemes_that_branch_off_one_run_have_the_figures_of_whole_runs() -> None:
    """Schemes of one backup share what is before the failure, with another policy or drafts behind
    it, and end when their window has closed; nothing of that is seen in a figure.
    """
    draft = lumen.LLAMA.draft
    assert draft is not None
    setup = replace(
        lumen.OPT,
        requests=60,
        most_output=48,
        reload_s=2.0,
        schemes=(lumen.STOP, lumen.PROGRESSIVE, lumen.SCHEDULING, lumen.AUTO),
        draft=replace(draft, load_s=0.5),
    )
    name, clean = "3x1:6.0#0", dict[tuple[int, float, int], lumen.Run]()

    whole = lumen.cell(setup, name, clean)

    assert lumen.forked_cell(setup, name, {}, jobs=2) == whole
    other = lumen.cell(setup, "3x1:6.0#1", {})
    assert lumen.forked_cell(setup, "3x1:6.0#1", {}, jobs=2) == other
    assert len({row["pause_s"] for row in other.values()}) > 2, "schemes differ"
    assert whole["+ progressive"]["draft_steps"] > 0
    (without_failure,) = clean.values()
    case = lumen.Case.of(setup, "3x1:6.0")
    world, fault_s = lumen.world_of(case, lumen.STOP, 0, drafts=False)
    closed = lumen.until_it_has_closed(world, fault_s, without_failure, setup)
    assert len(closed.records) < len(without_failure.records), "its window closes before the end"
