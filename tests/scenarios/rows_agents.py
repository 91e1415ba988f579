"""Rows of agents, their checkpoints and the nodes on which they lie."""

from typing import Any

from kvrs_testkit.scenarios import BACK, Expected, Load, Row, Scenario, fault, kill, stop

LONG = Load(streams=4, prompt_tokens=400, tokens=150)
CAPACITY_BYTES = 2 << 30
RESTORES: dict[str, Any] = {"name": "always_restore"}


def backup(mode: str, capacity_bytes: int = CAPACITY_BYTES, **policy: Any) -> Row:
    section = {"mode": mode, "capacity_bytes": capacity_bytes}
    return {"backup": section, "policy": RESTORES | policy}


AGENT_ROWS = [
    Scenario(
        name="agent",
        rule="An agent that dies costs no stream anything.",
        faults=kill("agent-n0", at_s=2.0),
        settings=backup("remote"),
        load=LONG,
        expected=Expected(lost={"agent-n0"}, recovers=False, attempts=None),
        not_real=BACK,
    ),
    Scenario(
        name="agents-all",
        rule="Nor do all of them at once.",
        faults=(fault("kill", {"role": "agent", "pick": "all"}, at_s=2.0),),
        settings=backup("both"),
        load=LONG,
        expected=Expected(lost={"agent-n0", "agent-n1"}, recovers=False, attempts=None),
        not_real=BACK,
    ),
    Scenario(
        name="agent-paused",
        rule="A silent agent is lost by its silence alone, and nothing moves.",
        faults=stop({"id": "agent-n0"}, 12.0, at_s=1.5),
        settings=backup("remote"),
        load=Load(streams=4, tokens=500),
        expected=Expected(lost={"agent-n0"}, recovers=False, attempts=None),
    ),
    Scenario(
        name="restore-remote",
        rule="Streams are restored from the agent of another node.",
        faults=kill("d0", at_s=2.5),
        settings=backup("remote"),
        load=LONG,
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}, options={"restore"}),
    ),
    Scenario(
        name="restore-local",
        rule="The agent of its own node outlives a process: the other node fetches from it.",
        faults=kill("d0", at_s=2.5),
        settings=backup("local"),
        load=LONG,
        expected=Expected(lost={"d0"}, left={"d0"}, to={"d1"}, options={"restore"}),
    ),
    Scenario(
        name="restore-local-without-the-node",
        rule="What only the lost node's agent had is computed again.",
        faults=(*kill("agent-n0", at_s=2.5), *kill("d0", at_s=3.0)),
        settings=backup("local"),
        load=LONG,
        expected=Expected(lost={"d0", "agent-n0"}, left={"d0"}, to={"d1"}, options={"recompute"}),
        not_real=BACK,
    ),
    Scenario(
        name="restore-from-a-returned-agent",
        rule="An agent that was started again has the checkpoints of the process before it.",
        faults=(*kill("agent-n1", at_s=2.0), *kill("d0", at_s=4.0)),
        settings=backup("remote"),
        load=Load(streams=4, prompt_tokens=400, tokens=250),
        back_s=0.5,
        expected=Expected(lost={"d0", "agent-n1"}, left={"d0"}, options={"restore"}),
    ),
    Scenario(
        name="restore-without-room",
        rule="A stream that found no room at any agent is unprotected: it is computed again.",
        faults=kill("d0", at_s=2.5),
        settings=backup("remote", capacity_bytes=1 << 16),
        load=LONG,
        expected=Expected(lost={"d0"}, left={"d0"}, options={"recompute"}),
        not_real="an embedded engine's pages are smaller",
    ),
    Scenario(
        name="slots-without-an-agent",
        rule="Where the target's agent has died the proxy grants its slots itself.",
        faults=(*kill("agent-n1", at_s=2.0), *kill("d0", at_s=2.5)),
        settings=backup("both", name="always_migrate"),
        load=LONG,
        expected=Expected(
            lost={"d0", "agent-n1"}, left={"d0"}, to={"d1"}, options={"migrate"}, pause_s=3.0
        ),
        not_real=BACK,
    ),
    Scenario(
        name="slots-of-a-silent-agent",
        rule="An agent that does not answer is waited for, but not for long.",
        faults=(*stop({"id": "agent-n1"}, 8.0, at_s=2.0), *kill("d0", at_s=2.1)),
        settings=backup("remote", name="always_migrate"),
        load=LONG,
        expected=Expected(left={"d0"}, to={"d1"}, options={"migrate"}, pause_s=3.0),
        not_real=BACK,
    ),
]
