"""Rows of instances that are paused, slow or ended by what they are asked, and of whole nodes."""

from dataclasses import replace

from kvrs_testkit.scenarios import (
    BACK,
    CONNECTS,
    DECODE,
    FLOW,
    NO_POISON,
    PAIR,
    PREFILL,
    VLLM,
    Expected,
    Load,
    Scenario,
    fault,
    kill,
    stop,
)

ALL_DECODE = {"role": "decode", "pick": "all"}

PAUSED = [
    Scenario(
        name="paused-beside-another",
        rule="After the usual limit, far shorter than the pause, streams go on elsewhere.",
        faults=stop({"id": "d1"}, 8.0),
        nodes=(PREFILL, DECODE, DECODE),
        load=FLOW,
        seeds=4,
        expected=Expected(lost={"d1"}, left={"d1"}, to={"d2"}, pause_s=6.0),
    ),
    Scenario(
        name="paused-alone",
        rule="Streams of the only decode instance, and new requests, wait: nothing is given up.",
        faults=stop({"id": "d1"}, 8.0),
        nodes=(PREFILL, DECODE),
        load=FLOW,
        seeds=4,
        expected=Expected(lost=set(), recovers=False, attempts=None, failed=0),
        not_real=CONNECTS,
    ),
    Scenario(
        name="paused-all",
        rule="To give up one of them would only move its streams to another silent one.",
        faults=stop(ALL_DECODE, 8.0),
        nodes=(PREFILL, DECODE, DECODE),
        load=FLOW,
        seeds=4,
        expected=Expected(lost=set(), recovers=False, attempts=None, failed=0),
        not_real=CONNECTS,
    ),
    Scenario(
        name="paused-beyond-the-longest-silence",
        rule="`proxy.token_gap_s` ends the wait, then everything is as with any silence.",
        faults=stop({"id": "d1"}, 14.0),
        nodes=(PREFILL, DECODE),
        load=FLOW,
        # Two attempts; three where a connection to the only instance times out meanwhile.
        expected=Expected(lost={"d1"}, left={"d1"}, attempts=None),
    ),
]

PAUSED_ROWS = [
    *PAUSED,
    *(replace(row, name=f"{row.name}-vllm", is_vllm=True, not_real=VLLM) for row in PAUSED),
    Scenario(
        name="paused-for-a-moment",
        rule="A pause that is shorter than any limit costs no stream its place.",
        faults=stop({"id": "d1"}, 1.2),
        nodes=(PREFILL, DECODE, DECODE),
        load=FLOW,
        expected=Expected(lost=set(), recovers=False, attempts=None, failed=0),
        not_real=CONNECTS,
    ),
    Scenario(
        name="paused-and-killed",
        rule="A silent process that dies is lost at once, and not when its silence is over.",
        faults=(*stop({"id": "d1"}, 8.0), *kill("d1", at_s=4.5)),
        nodes=(PREFILL, DECODE, DECODE),
        load=FLOW,
        expected=Expected(lost={"d1"}, to={"d2"}, pause_s=1.0),
        not_simulated="its schedule hits nothing that is frozen",
        not_real=BACK,
    ),
    Scenario(
        name="paused-target",
        rule="A target that falls silent is left like any other: a third one takes its streams.",
        faults=(*kill("d1", at_s=2.0), *stop({"id": "d2"}, 8.0, at_s=2.6)),
        nodes=(PREFILL, DECODE, DECODE, DECODE),
        load=Load(streams=6, tokens=200),
        expected=Expected(lost={"d1", "d2"}, left={"d1", "d2"}, to={"d2", "d3"}, attempts=3),
        not_real=BACK,
    ),
    Scenario(
        name="paused-and-used-again",
        rule="A process that wakes is fenced, and gets new streams like any other.",
        faults=stop({"id": "d1"}, 6.0),
        nodes=(PREFILL, DECODE, DECODE),
        load=Load(streams=100, every_s=0.125, tokens=60),
        expected=Expected(lost={"d1"}, to={"d2"}, new_at=frozenset({"d1"})),
        not_real=CONNECTS,
    ),
    Scenario(
        name="paused-idle",
        rule="Nothing must be sent to an instance to find out that it is silent.",
        faults=stop({"id": "d1"}, 9.0, at_s=1.0),
        nodes=(PREFILL, DECODE, DECODE),
        load=Load(first_s=7.5),
        expected=Expected(
            lost={"d1"}, recovers=False, attempts=None, failed=0, none_at=frozenset({"d1"})
        ),
    ),
    Scenario(
        name="paused-node",
        rule="Both instances of a node fall silent: their streams go on at the other node.",
        faults=stop({"node": "n0"}, 8.0),
        load=FLOW,
        expected=Expected(lost={"p0", "d0"}, to={"d1"}, attempts=None),
        not_real=CONNECTS,
    ),
    Scenario(
        name="node-lost",
        rule="A machine that is gone resets no connection: silence tells.",
        faults=(fault("kill", {"node": "n0"}, at_s=2.0),),
        load=Load(streams=8, tokens=150),
        expected=Expected(left={"d0"}, to={"d1"}, pause_s=5.0),
        not_real="processes that are killed on this machine reset their connections",
    ),
    Scenario(
        name="slow",
        rule="Ten times as slow is alive: a stream that crawls is left where it is.",
        faults=(fault("slow", {"id": "d0"}, at_s=1.5, factor=10.0, for_s=6.0),),
        expected=Expected(lost=set(), recovers=False, attempts=None),
    ),
    Scenario(
        name="node-with-its-agent",
        rule="The pages that the agent held are gone with it.",
        faults=(
            fault("kill", {"id": "p0"}, at_s=2.0),
            fault("kill", {"id": "d0"}, at_s=2.0),
            fault("kill", {"id": "agent-n0"}, at_s=2.0),
        ),
        nodes=(PAIR, PAIR, PAIR),
        settings={"backup": {"mode": "both"}},
        load=Load(streams=6),
        expected=Expected(lost={"p0", "d0", "agent-n0"}, left={"d0"}),
    ),
    Scenario(
        name="poison-in-prefill",
        rule="A request that kills what it runs on kills three, and no stream beside it.",
        faults=(),
        nodes=(PAIR,) * 6,
        load=Load(streams=25, poisons=(24,), poison_at=-1),
        expected=Expected(
            ended={"complete": 24, "poison": 1}, recovers=None, attempts=None, poison_deaths={3}
        ),
        not_simulated="a simulated poison ends decode instances",
        not_real=NO_POISON,
    ),
    Scenario(
        name="three-poisons",
        rule="Between streams that flow and streams that begin, while instances restart.",
        faults=(),
        nodes=(PAIR,) * 4,
        load=Load(streams=33, poisons=(20, 21, 22)),
        back_s=0.5,
        expected=Expected(
            ended={"complete": 30, "poison": 3},
            recovers=None,
            attempts=None,
            poison_deaths={1, 2, 3},
        ),
        not_real=NO_POISON,
    ),
    Scenario(
        name="poison-that-kills-late",
        rule="It has had tokens: the kill while it flowed does not count, three more do.",
        faults=(),
        nodes=(PAIR,) * 6,
        load=Load(streams=19, poisons=(18,), poison_at=5),
        expected=Expected(
            ended={"complete": 18, "poison": 1},
            recovers=None,
            attempts=None,
            poison_deaths={1, 2, 3, 4},
        ),
        not_simulated="a simulated poison ends its instance at once",
        not_real=NO_POISON,
    ),
]
