"""Rows of instances that are drained, about to end, or fail what they are sent."""

from kvrs_testkit.scenarios import (
    DECODE,
    PAIR,
    PREFILL,
    SCRIPT,
    Becomes,
    Condition,
    Expected,
    Load,
    Scenario,
    kill,
)

SOME = Load(streams=24, every_s=0.125, tokens=80)
STEADY = Load(streams=60, every_s=0.1, tokens=20)


def becomes(whom: str, what: Condition, at_s: float = 2.1) -> Becomes:
    return Becomes(whom, what, at_s)


CONDITION_ROWS = [
    Scenario(
        name="drained",
        rule="An operator's order keeps new streams away; those that run there end there.",
        becomes=(becomes("d0", Condition.DRAINED),),
        load=SOME,
        seeds=1,
        expected=Expected(
            lost=set(), recovers=False, attempts=None, failed=0, none_at=frozenset({"d0"})
        ),
        not_real=SCRIPT,
    ),
    Scenario(
        name="drained-and-cleared",
        rule="When its time is over what still runs there is moved, and nothing is lost.",
        becomes=(becomes("d0", Condition.CLEARED),),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), left={"d0"}, to={"d1"}, none_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="drained-prefill",
        rule="A drained prefill instance computes what it has, and gets no other request.",
        becomes=(becomes("p0", Condition.DRAINED),),
        load=SOME,
        seeds=1,
        expected=Expected(
            lost=set(), recovers=False, attempts=None, failed=0, none_at=frozenset({"p0"})
        ),
        not_real=SCRIPT,
    ),
    Scenario(
        name="drain-withdrawn",
        rule="The order is withdrawn: the instance is used like any other.",
        becomes=(becomes("d0", Condition.DRAINED), becomes("d0", Condition.WELL, 3.0)),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), recovers=False, attempts=None, new_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="drained-process-is-replaced",
        rule="An order holds for the next process too.",
        faults=kill("d0", at_s=3.0),
        becomes=(becomes("d0", Condition.CLEARED),),
        load=SOME,
        seeds=1,
        back_s=0.5,
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}, none_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="drained-and-the-last",
        rule="When all others have died a drained instance serves: better there than not at all.",
        faults=kill("d1", at_s=3.0),
        becomes=(becomes("d0", Condition.CLEARED),),
        load=SOME,
        seeds=1,
        expected=Expected(lost={"d1"}, left={"d0", "d1"}, to={"d0", "d1"}, attempts=None),
        not_real=SCRIPT,
    ),
    Scenario(
        name="about-to-end",
        rule="Streams leave an instance that says so while it still runs; it is not lost.",
        becomes=(becomes("d0", Condition.ENDING),),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), left={"d0"}, to={"d1"}, none_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="about-to-end-alone",
        rule="The only one of its role keeps its streams, and gets new ones.",
        becomes=(becomes("d1", Condition.ENDING),),
        nodes=(PREFILL, DECODE),
        load=SOME,
        seeds=1,
        expected=Expected(
            lost=set(), recovers=False, attempts=None, failed=0, new_at=frozenset({"d1"})
        ),
        not_real=SCRIPT,
    ),
    Scenario(
        name="about-to-end-and-dies",
        rule="Its streams had left before its process died: nothing is recovered twice.",
        faults=kill("d0", at_s=3.0),
        becomes=(becomes("d0", Condition.ENDING),),
        load=SOME,
        seeds=1,
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}, attempts=2),
        not_real=SCRIPT,
    ),
    Scenario(
        name="gpu-failing",
        rule="Streams leave an instance whose GPU is failing while it still runs.",
        becomes=(becomes("d0", Condition.GPU_FAILING),),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), left={"d0"}, to={"d1"}, none_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="gpu-failing-alone",
        rule="Without another instance of its role it serves on.",
        becomes=(becomes("d1", Condition.GPU_FAILING),),
        nodes=(PREFILL, DECODE),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), recovers=False, attempts=None, new_at=frozenset({"d1"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="gpu-failing-under-a-new-process",
        rule="The engine is new, the board is not: its next process gets nothing either.",
        faults=kill("d0", at_s=3.0),
        becomes=(becomes("d0", Condition.GPU_FAILING),),
        load=SOME,
        seeds=1,
        back_s=0.5,
        expected=Expected(lost={"d0"}, left={"d0"}, none_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    Scenario(
        name="gpu-degraded",
        rule="A board that is too warm serves like any other.",
        becomes=(becomes("d0", Condition.GPU_DEGRADED),),
        load=SOME,
        seeds=1,
        expected=Expected(lost=set(), recovers=False, attempts=None, new_at=frozenset({"d0"})),
        not_real=SCRIPT,
    ),
    *(
        Scenario(
            name=f"fails-{role}",
            rule="An instance that fails every call costs no request its answer, and gets few.",
            becomes=(becomes(name, Condition.FAILS),),
            nodes=(PAIR, PAIR, PAIR),
            load=STEADY,
            seeds=1,
            expected=Expected(lost=set(), recovers=None, attempts=None, at_most={name: 12}),
            not_real=SCRIPT,
        )
        for role, name in (("prefill", "p0"), ("decode", "d0"))
    ),
    Scenario(
        name="busy-for-a-while",
        rule="Streams wait for busy instances: an answer that there is no room is no failure.",
        becomes=tuple(
            becomes(name, what, at_s)
            for name in ("p0", "p1", "d0", "d1")
            for what, at_s in ((Condition.BUSY, 2.0), (Condition.WELL, 5.0))
        ),
        settings={"policy": {"recovery": {"max_attempts": 1}}},
        load=Load(streams=20, every_s=0.1, tokens=20),
        seeds=1,
        expected=Expected(lost=set(), recovers=None, attempts=None),
        not_real=SCRIPT,
    ),
]
