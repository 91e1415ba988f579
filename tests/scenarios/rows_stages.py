"""Rows of instances with a host for each stage, which they lend each other."""

from functools import partial

from kvrs_testkit.scenarios import (
    BOTH,
    LONG_FLOW,
    NO_HOSTS,
    STAGES,
    Expected,
    Row,
    Scenario,
    fault,
    kill,
)

_pipelines = partial(Scenario, load=LONG_FLOW, not_scripted=NO_HOSTS, not_real=STAGES)


def _host(name: str, stage: int, at_s: float) -> Row:
    return fault("kill", {"id": name, "stage": stage}, at_s=at_s)


SUBSTITUTED = {("d0", "substitute")}

STAGE_ROWS = [
    _pipelines(
        name="host-lost",
        rule="Its stage is borrowed: no instance is lost, and some streams keep their attempts.",
        faults=(_host("d0", 1, 3.0),),
        nodes=(BOTH, BOTH),
        stages=2,
        expected=Expected(lost=set(), left={"d0"}, stayed=SUBSTITUTED, pause_s=1.0),
    ),
    _pipelines(
        name="host-lost-twice",
        rule="One lender has both stages of an instance that has lost two.",
        faults=(_host("d0", 0, 3.0), _host("d0", 1, 3.0)),
        nodes=(BOTH, BOTH),
        stages=2,
        expected=Expected(lost=set(), left={"d0"}, stayed=SUBSTITUTED, pause_s=1.0),
    ),
    _pipelines(
        name="lender-lost-while-it-lends",
        rule="The host that has the stage dies: lender and borrower lose it, a third one lends.",
        faults=(_host("d0", 1, 4.0), _host("d0", 1, 5.0)),
        nodes=(BOTH, BOTH, BOTH),
        stages=2,
        expected=Expected(
            lost=set(), left={"d0", "d1"}, stayed=SUBSTITUTED, attempts=None, pause_s=1.0
        ),
    ),
    _pipelines(
        name="borrower-lost",
        rule="The instance that borrows dies: its streams leave, and the loan ends.",
        faults=(_host("d0", 1, 3.0), *kill("d0", at_s=4.0)),
        nodes=(BOTH, BOTH),
        stages=2,
        back_s=1.0,
        expected=Expected(lost={"d0"}, left={"d0"}, stayed=set(), pause_s=1.0),
    ),
    _pipelines(
        name="no-lender-and-nowhere-to-go",
        rule="Streams wait for the own host in their attempts.",
        faults=(*kill("d1", at_s=2.0), _host("d0", 1, 4.0)),
        nodes=(BOTH, BOTH),
        stages=2,
        expected=Expected(lost={"d1"}, stayed={("d0", "in_place")}),
    ),
]
