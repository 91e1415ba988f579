"""Unmodified agents do tasks of five tool calls while a decode server dies in each task.

The functions of the tools note what runs. Each client does all tasks calm, then with a death in
each, which come in every part of a turn and in every turn. In the setting *equal* other servers
live; in *alone* the only decode server dies, and is back after the proxy has given up.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.agent_tasks.cluster import Cluster, Kill, cluster
from experiments.agent_tasks.model import OF_THE_LAST_TURN, TURNS, Phase, calls_of, question
from experiments.command_line import parser_of
from experiments.record import ROOT, Record

PROGRAM = Path(__file__).with_name("client.py")
AGENTS = ROOT / ".venv-agents" / "bin" / "python"
# By client: the interpreter of its environment.
PYTHONS = {
    "anthropic": Path(sys.executable),
    "responses": AGENTS,
    "chats": AGENTS,
    "langgraph": AGENTS,
}
PACKAGES = ("anthropic", "openai", "openai-agents", "langchain", "langchain-openai", "langgraph")
SETTINGS: dict[str, dict[str, Any]] = {
    "equal": {"decodes": 3, "back_after_s": 1.0},
    "alone": {"decodes": 1, "back_after_s": 3.0, "wait_s": 0.5},
}
TASKS = 20
WHOLE_SHARE = 0.9
# What the exception of a client shows of the error with which the proxy ends a stream.
EXPLICIT = {
    "anthropic": '"type": "overloaded_error"',
    "responses": "`response.failed`. status=failed; error=ResponseError(code='server_error'",
    "chats": '"type": "server_error"',
    "langgraph": '"type": "server_error"',
}


@dataclass(frozen=True, slots=True)
class Done:
    """The record of a task that a client has done."""

    calls: list[tuple[str, dict[str, Any]]]
    final: str | None
    error: str | None  # Name of the exception.
    said: str
    seconds: float

    def against(self, calm: "Done") -> str:
        """The verdict on a task with a death."""
        if more := Counter(map(_key, self.calls)) - Counter(map(_key, calm.calls)):
            is_known = set(more) <= set(map(_key, calm.calls))
            return "twice" if is_known else "wrong"
        if self.error is not None:
            return "error" if self.calls == calm.calls[: len(self.calls)] else "wrong"
        return "whole" if (self.calls, self.final) == (calm.calls, calm.final) else "silent"


VERDICTS = ("whole", "error", "silent", "twice", "wrong")


def _key(call: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(call, sort_keys=True)


@dataclass
class Agent:
    """A process of `client.py`."""

    name: str
    process: asyncio.subprocess.Process

    async def do(self, task: int) -> Done:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question(task).encode() + b"\n")
        await self.process.stdin.drain()
        said = json.loads(await self.process.stdout.readline())
        said["calls"] = [(name, arguments) for name, arguments in said["calls"]]
        return Done(**said)


@asynccontextmanager
async def agent(name: str, url: str) -> AsyncIterator[Agent]:
    """Start a client; it ends with its input."""
    pipe = asyncio.subprocess.PIPE
    words = [str(PYTHONS[name]), "-P", str(PROGRAM), name, url]
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, limit=1 << 24)
    try:
        yield Agent(name, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def kill_of(task: int) -> Kill:
    """The death in a task: over 20 of them, each turn and each part of a turn."""
    turn = task % TURNS
    phases = OF_THE_LAST_TURN if turn == TURNS - 1 else tuple(Phase)
    return Kill(turn, phases[(task // TURNS * 3 + task) % len(phases)])


@dataclass
class Series:
    """The tasks of one client in one setting."""

    client: str
    setting: str
    tasks: list[dict[str, Any]] = field(default_factory=list)
    calm_is_right: bool = True
    violations: list[str] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        return sum(each["verdict"] == verdict for each in self.tasks)

    @property
    def missed(self) -> list[str]:
        """The bars that this series misses."""
        wrong = sum(self.count(each) for each in ("silent", "twice", "wrong"))
        bars = {
            "calm tasks are right": self.calm_is_right,
            "no call but those of calm, none twice, no silent end": not wrong,
            "a server died in each task": all(each["died"] for each in self.tasks),
            "no violation": not self.violations,
            "each error is the stream's own": all(
                each["is_explicit"] for each in self.tasks if each["verdict"] == "error"
            ),
        }
        if self.setting == "equal":
            least = WHOLE_SHARE * len(self.tasks)
            bars["whole tasks"] = self.count("whole") >= least
        return [name for name, is_met in bars.items() if not is_met]


async def measure(
    client: str, setting: str, tasks: Sequence[int], calm: dict[int, Done] | None = None
) -> Series:
    """Do the tasks with deaths. Those that `calm` lacks are done without any first, and added."""
    series = Series(client, setting)
    calm = {} if calm is None else calm
    async with cluster(**SETTINGS[setting]) as system, agent(client, system.url) as doing:
        for task in tasks:
            if task not in calm:
                calm[task] = await doing.do(task)
        series.calm_is_right = all(_is_right(task, each) for task, each in calm.items())
        for task in tasks:
            series.tasks.append(await _one(system, doing, task, calm[task]))
        series.violations = system.violations()
    return series


def _is_right(task: int, calm: Done) -> bool:
    wanted = [(call.name, call.arguments) for call in calls_of(task)]
    return calm.error is None and calm.calls == wanted and bool(calm.final)


async def _one(system: Cluster, doing: Agent, task: int, calm: Done) -> dict[str, Any]:
    """Do a task with a death; return its row."""
    kill = system.deaths.next = kill_of(task)
    died, begun_s = len(system.deaths.died), time.time()
    done = await doing.do(task)
    state = await system.state()
    system.deaths.next = None
    # The next victim, and a server that equals it where that has to live.
    await system.until_tested(min(2, len(system.servers) - 1))
    verdict = done.against(calm)
    row = {
        "task": task,
        "turn": kill.turn,
        "phase": kill.phase.value,
        "verdict": verdict,
        "calls": len(done.calls),
        "died": system.deaths.died[died:],
        "options": [row["option"] for row in state["recoveries"] if row["at_s"] >= begun_s],
        "error": done.error,
        "said": done.said[:400],
        "is_explicit": done.error is not None and EXPLICIT[doing.name] in done.said,
        "seconds": done.seconds,
        "seconds_calm": calm.seconds,
    }
    is_good = verdict in ("whole", "error")
    return row if is_good else row | {"done": done.calls, "final": done.final}


def as_text(series: Sequence[Series]) -> str:
    """A line for each client and setting, the errors below it."""
    heads = "".join(f"{each:>8}" for each in ("tasks", *VERDICTS))
    lines = [f"{'client':<12}{'setting':<9}{heads}"]
    for each in series:
        counts = [len(each.tasks), *(each.count(verdict) for verdict in VERDICTS)]
        figures = "".join(f"{count:>8}" for count in counts)
        lines.append(f"{each.client:<12}{each.setting:<9}{figures}")
        options = Counter(option for task in each.tasks for option in task["options"])
        lines.append(f"    recoveries: {dict(options)}")
        errors = Counter(
            (task["error"], task["phase"]) for task in each.tasks if task["error"] is not None
        )
        lines += [f"    {name} {phase}: {count}" for (name, phase), count in errors.items()]
        lines += [f"    bar: {bar}: MISSED" for bar in each.missed]
    return "\n".join(lines)


async def versions() -> dict[str, str]:
    """The versions of the clients, by package."""
    found: dict[str, str] = {}
    program = (
        "import importlib.metadata as m, json, sys\n"
        "there = {each.name: each.version for each in m.distributions()}\n"
        "print(json.dumps({each: there[each] for each in sys.argv[1:] if each in there}))"
    )
    for python in dict.fromkeys(PYTHONS.values()):
        if shutil.which(python) is None:
            continue
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-c", program, *PACKAGES), stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
        found |= json.loads(said)  # That of the agents last: only anthropic runs in ours.
    return found


async def _run(options: argparse.Namespace) -> tuple[list[Series], dict[str, str]]:
    series: list[Series] = []
    for client in options.client:
        if shutil.which(PYTHONS[client]) is None:
            print(f"{client}: skipped, no environment {AGENTS.parent.parent.name} (README.md)")
            continue
        calm: dict[int, Done] = {}
        for setting in options.setting:
            series.append(await measure(client, setting, range(options.tasks), calm))
            print(as_text(series[-1:]), file=sys.stderr, flush=True)
    return series, await versions()


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--client", nargs="+", choices=PYTHONS, default=[*PYTHONS], metavar="NAME")
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--tasks", type=int, default=TASKS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    record = Record(timed=False)
    series, packages = asyncio.run(_run(options))
    text = as_text(series)
    print(text)
    figures = {"packages": packages, "series": [_figures(each) for each in series]}
    is_void = record.keep(options.out, "agent_tasks", figures, text)
    return 1 if is_void or any(each.missed for each in series) else 0


def _figures(series: Series) -> dict[str, Any]:
    counts = {verdict: series.count(verdict) for verdict in VERDICTS}
    return (
        {"client": series.client, "setting": series.setting}
        | counts
        | {
            "missed": series.missed,
            "violations": series.violations,
            "tasks": series.tasks,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
