"""The rows."""

from dataclasses import replace
from typing import Any

from kvrs_testkit.scenarios import DECODE, PAIR, Expected, Load, Row, Scenario

PREFILL = ("prefill",)


def fault(what: str, whom: Row, **when: Any) -> Row:
    more = {name: when.pop(name) for name in ("for_s", "factor") if name in when}
    return {"when": when, "what": what, "whom": whom} | more


def kill(*names: str, **when: Any) -> tuple[Row, ...]:
    return tuple(fault("kill", {"id": name}, **when) for name in names)


def stop(whom: Row, for_s: float, at_s: float = 4.0) -> tuple[Row, ...]:
    return (fault("stop", whom, at_s=at_s, for_s=for_s),)


ALL_DECODE = {"role": "decode", "pick": "all"}
BACK = "a supervisor brings back every process that was killed"
CONNECTS = (
    "a new connection to a stopped process fails after 1 s: a request that comes during the "
    "pause makes a second attempt"
)
VLLM = "tests/vllm has real ones"
NO_POISON = "no request ends the embedded engine"
ONE_STREAM = Load(streams=1)
FLOW = Load(streams=40, every_s=0.125, tokens=150)  # Some come while instances are paused.

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
        expected=Expected(lost={"d1"}, left={"d1"}),
    ),
]

ROWS = [
    Scenario(
        name="prefill-dead-already",
        rule="Before the hand-off: nothing goes there, nothing is recovered.",
        faults=kill("p0", at_s=0.5),
        load=Load(first_s=3.0),
        expected=Expected(lost={"p0"}, recovers=False, attempts=None),
        not_real=BACK,
    ),
    Scenario(
        name="prefill-at-work",
        rule="During prefill: the client, which has nothing yet, only waits a little longer.",
        faults=kill("p0", phase="prefill"),
        load=Load(prompt_tokens=400),
        expected=Expected(lost={"p0"}, left={"p0"}),
        not_real=BACK,
    ),
    Scenario(
        name="prefill-after-the-hand-off",
        rule="The stream goes on untouched.",
        faults=kill("p0", at_s=2.0, phase="decode"),
        expected=Expected(lost={"p0"}, recovers=False, attempts=None),
    ),
    Scenario(
        name="prefill-then-decode",
        rule="What a dead prefill instance retained is no source any more.",
        faults=(*kill("p0", at_s=2.0), *kill("d0", at_s=2.5)),
        settings={"policy": {"name": "always_migrate"}},
        load=ONE_STREAM,
        expected=Expected(lost={"p0", "d0"}, left={"d0"}, to={"d1"}, options={"recompute"}),
        not_real=BACK,
    ),
    Scenario(
        name="decode",
        rule="Its streams go on at the others, and only they.",
        faults=kill("d0", at_s=2.0, inflight_at_least=2),
        nodes=(PAIR, PAIR, PAIR),
        load=Load(streams=9),
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1", "d2"}),
    ),
    Scenario(
        name="slots-are-given-back",
        rule="Victims fetch one after the other, each as soon as the one before has its pages.",
        faults=kill("d0", at_s=2.0, inflight_at_least=2),
        settings={"policy": {"name": "always_migrate", "slots_max": 1}},
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}, options={"migrate"}, pause_s=4.0),
    ),
    Scenario(
        name="target-during-a-recovery",
        rule="The recovery is decided again, and one token is not sent twice.",
        faults=(
            *kill("d0", at_s=2.0),
            fault("kill", {"role": "decode"}, at_s=2.0, phase="recovery"),
        ),
        nodes=(PAIR, PAIR, PAIR),
        load=ONE_STREAM,
        expected=Expected(lost={"d0", "d1"}, left={"d0", "d1"}, to={"d1", "d2"}, attempts=3),
        not_real=BACK,
    ),
    Scenario(
        name="half-the-cluster",
        rule="Several that die at once are one event.",
        faults=kill("d0", "p0", "d1", "p1", at_s=2.0),
        nodes=(PAIR, PAIR, PAIR, PAIR),
        settings={"policy": {"recovery": {"gather_s": 2.0}}},
        load=Load(streams=16),
        expected=Expected(lost={"d0", "p0", "d1", "p1"}, left={"d0", "d1"}, to={"d2", "d3"}),
        not_real=BACK,
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
        name="no-decode-instance-left",
        rule="After `wait_s` each stream ends with an error, and never looks complete.",
        faults=(fault("kill", ALL_DECODE, at_s=2.0),),
        settings={"policy": {"recovery": {"wait_s": 1.5}}},
        load=Load(streams=4),
        expected=Expected(
            ended={"no_instance": 4}, lost={"d0", "d1"}, recovers=None, attempts=None
        ),
        not_real=BACK,
    ),
    Scenario(
        name="decode-instances-return",
        rule="Streams that wait go on with the first decode instance that returns.",
        faults=(*kill("d0", at_s=1.5), *kill("d1", at_s=2.0)),
        load=Load(streams=4),
        back_s=3.0,
        expected=Expected(lost={"d0", "d1"}, left={"d0", "d1"}, to={"d0", "d1"}, attempts=None),
    ),
    Scenario(
        name="dies-again-and-again",
        rule="Every attempt may fail: `max_attempts` is for those that bring nothing.",
        faults=tuple(
            fault("kill", {"role": "decode"}, at_s=2.0 + n, phase="decode") for n in range(20)
        ),
        settings={"policy": {"recovery": {"max_attempts": 2}}},
        load=Load(streams=1, tokens=1500),
        back_s=0.3,
        expected=Expected(lost={"d0", "d1"}, left={"d0", "d1"}, attempts=21),
        not_real=BACK,
    ),
    Scenario(
        name="request-before-its-instance",
        rule="Starting is not failing: a request waits for an instance to come up.",
        faults=kill("d0", at_s=0.5),
        nodes=(PAIR,),
        load=ONE_STREAM,
        back_s=3.0,
        expected=Expected(lost={"d0"}, recovers=False, attempts=None),
    ),
    Scenario(
        name="request-before-its-prefill-instance",
        rule="A restart takes seconds, and costs no request its answer.",
        faults=kill("p0", at_s=0.5),
        nodes=(PAIR,),
        load=ONE_STREAM,
        back_s=3.0,
        expected=Expected(lost={"p0"}, recovers=False, attempts=None),
    ),
    Scenario(
        name="all-prefill-vllm",
        rule="Until one is back, new streams begin at decode instances, which compute prompts.",
        faults=(fault("kill", {"role": "prefill", "pick": "all"}, at_s=4.0),),
        nodes=(PAIR, PAIR, PAIR),
        is_vllm=True,
        load=Load(streams=120, every_s=0.17, tokens=60, prompt_tokens=20),
        back_s=8.0,
        expected=Expected(
            lost={"p0", "p1", "p2"}, recovers=None, attempts=None, without_prefill=40
        ),
        seeds=6,
        not_real=VLLM,
    ),
    *PAUSED,
    *(replace(row, name=f"{row.name}-vllm", is_vllm=True, not_real=VLLM) for row in PAUSED),
    Scenario(
        name="slow",
        rule="Ten times as slow is alive: a stream that crawls is left where it is.",
        faults=(fault("slow", {"id": "d0"}, at_s=1.5, factor=10.0, for_s=6.0),),
        expected=Expected(lost=set(), recovers=False, attempts=None),
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
