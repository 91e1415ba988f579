"""Every row of the table before a whole proxy with scripted instances, in memory and virtual time:
its ports, watches, attempts and clients are those of the product.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, assert_never

import msgspec
import pytest

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.openai.chunks import error_body
from kvrs_lab.cluster.fault_injection import views
from kvrs_lab.faults.language import What
from kvrs_lab.faults.schedule import DueFault, FaultSchedule
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scenarios import (
    DRAINS_S,
    Becomes,
    Condition,
    Entry,
    Found,
    Scenario,
    check,
    gpu_of,
)
from kvrs_testkit.scripted import Scripted
from kvrs_testkit.scripted_agent import ScriptedAgent
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_server import ScriptedServer
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of
from tests.proxy.backends.conftest import vllm_model as vllm_model
from tests.proxy.conftest import model as model
from tests.proxy.cuts import Case, comparable
from tests.scenarios.rows import ROWS
from tests.scenarios.rows_decode import DECODE_ROWS
from tests.scenarios.rows_requests import REQUEST_ROWS

ANSWERS = {Condition.FAILS: 500, Condition.BUSY: 503}
TOKEN_S, PREFILL_TOKEN_S = 0.02, 0.0005
FETCH_S = 0.03
LOOK_S = 0.01
SLOW_PERIOD_S = 0.2
# Status and type of what ends a request that has brought nothing yet, by its code.
REFUSED = {
    "poison": (422, "invalid_request_error"),
    "no_instance": (503, "server_error"),
    "busy": (503, "server_error"),
    "slo": (503, "server_error"),
    "retries": (502, "server_error"),
}


# In `make test`, where the rule is one of bytes and calls; the simulator has the other rows there.
FIRST = {row.name for row in [*DECODE_ROWS, *REQUEST_ROWS]}


class Entries:
    """An event log that is kept as it is."""

    def __init__(self) -> None:
        self.found: list[Entry] = []

    def note(self, _: float, event: ev.Event, actions: Sequence[act.Action]) -> None:
        self.found.append((event, tuple(actions)))


class Run:
    def __init__(self, row: Scenario, system: ProxyCluster) -> None:
        self._row, self._system = row, system
        self._schedule = FaultSchedule(row.parsed, 0, Random)
        self._sent = 0
        self._begun_s = time.monotonic()
        self._lasting: list[asyncio.Task[None]] = []
        self.answers: dict[int, list[bytes]] = {}  # Of requests with fields of their own.

    async def found(self) -> Found:
        load, script, entries = self._row.load, self._system.script, Entries()
        script.pause_s, script.prefill_s = TOKEN_S, PREFILL_TOKEN_S * load.prompt_tokens
        script.fetch_s = FETCH_S
        script.poisons = {f"s{number}": load.poison_at for number in load.poisons}
        self._system.proxy.parts.driver.control._trace = entries.note
        for instance in self._system.instances.values():
            if isinstance(instance, Scripted):
                instance.agents = self._system.agents
        self._begin(self._carry_out_all())
        for change in self._row.becomes:
            self._begin(self._become(change))
        if load.poisons:
            self._begin(self._bring_back_poisoned())
        prompts = enumerate(load.prompts(0))
        ends = await asyncio.gather(*(self._ask(number, prompt) for number, prompt in prompts))
        seen = list(entries.found)
        for task in self._lasting:
            task.cancel()
        for failed in await asyncio.gather(*self._lasting, return_exceptions=True):
            assert failed is None or isinstance(failed, asyncio.CancelledError), failed
        poison_deaths = Counter(user for user, _ in script.poisoned)
        never_due = [each.label for each in self._schedule.pending]
        state = await self._system.state()
        assert state["streams"] == []
        last = {each["stream"]: each["outcome"] for each in state["recoveries"]}
        assert set(last.values()) <= (
            {"resumed", "ended"} if self._row.expected.ended else {"resumed"}
        )
        if not load.poisons and not self._row.is_vllm and not self._row.becomes:
            assert await self._system.count("kvrs_attempts_failed_total") == 0, "one event a loss"
        _look_at(state["recoveries"], seen)
        pauses_s = [row["gap_s"] for row in state["recoveries"] if row["gap_s"] is not None]
        return Found(Counter(ends), seen, never_due, pauses_s, poison_deaths)

    async def _ask(self, number: int, prompt: list[int]) -> str:
        """How the stream ended; its tokens are those of an undisturbed one."""
        load = self._row.load
        await asyncio.sleep(load.at_s(number))
        self._sent += 1
        request: dict[str, Any] = {
            "max_tokens": load.tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "user": f"s{number}",
            **load.fields,
        }
        if "messages" not in request:
            request.setdefault("prompt", prompt)
        status, body = await self._system.complete(**request)
        if status != 200:
            error = msgspec.json.decode(body)["error"]
            assert (status, error["type"]) == REFUSED[error["code"]], error
            return str(error["code"])
        if load.fields:
            self.answers[number] = comparable(body, Case(self._row.name, "", request))
            return "complete"
        *events, last, end = [event[6:] for event in events_of(body)]
        assert end == b""
        if last != b"[DONE]":
            return str(msgspec.json.decode(last)["error"]["code"])
        choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert ids == expected_ids(prompt, load.tokens)
        return "complete"

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._lasting.append(asyncio.create_task(work))

    async def _carry_out_all(self) -> None:
        while self._schedule.pending:
            elapsed_s = time.monotonic() - self._begun_s
            if self._schedule.needs_load(elapsed_s, self._sent):
                up = views(await self._system.state())
                for due in self._schedule.due(elapsed_s, self._sent, up):
                    self._carry_out(due)
            await asyncio.sleep(LOOK_S)

    def _carry_out(self, due: DueFault) -> None:
        processes: dict[str, ScriptedServer] = {**self._system.instances, **self._system.agents}
        for victim in (processes[name] for name in due.instances):
            match due.fault.what:
                case What.KILL:
                    is_node = due.fault.whom.node is not None and due.fault.whom.role is None
                    self._begin(self._kill(victim, silently=is_node))
                case What.STOP:
                    self._begin(_stop(victim, due.fault.for_s or 0.0))
                case What.SLOW:
                    self._begin(_slow(victim, due.fault.factor or 1.0, due.fault.for_s or 0.0))
                case What.LINK_RATE | What.LINK_CUT | What.CORRUPT_PAGE | What.LOSE_DEVICE:
                    raise AssertionError(f"scripted instances have no pages: {due.fault.what}")
                case _:
                    assert_never(due.fault.what)

    async def _bring_back_poisoned(self) -> None:
        while True:
            await asyncio.sleep(self._row.back_s)
            for instance in self._system.instances.values():
                if instance.dying is not None and instance.dying.done():
                    instance.dying = None
                    await instance.restart()

    async def _kill(self, victim: ScriptedServer, *, silently: bool) -> None:
        """With its node nothing is left to reset connections, and an agent's memory is lost."""
        if silently:
            victim.freeze()
            if isinstance(victim, ScriptedAgent):
                victim.pages.clear()
        else:
            await victim.kill()
        await asyncio.sleep(self._row.back_s)
        if silently:
            await victim.kill()
        await victim.restart()

    async def _become(self, change: Becomes) -> None:
        """Each condition ends the one before."""
        await asyncio.sleep(change.at_s)
        name, what, system = InstanceId(change.whom), change.what, self._system
        instance, control = system.instances[name], system.proxy.parts.driver.control
        status = ANSWERS.get(what)
        instance.refusal = None if status is None else (status, error_body("no"))
        instance.draining = what is Condition.ENDING
        instance.hangs = what is Condition.HANGS
        control.gpus_seen(NodeId(instance.node), [gpu_of(name, what)], time.monotonic())
        url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/drain/{name}"
        drain_s = DRAINS_S.get(what)
        method, query = ("DELETE", "") if drain_s is None else ("POST", f"?drain_s={drain_s}")
        async with system.http.request(method, url + query) as answer:
            assert answer.status == 200, await answer.text()


def _look_at(recoveries: Sequence[Any], seen: Sequence[Entry]) -> None:
    """Each tells how far its stream was, how long it took, and one estimate of every option: first
    that of the chosen one.
    """
    produced: set[tuple[str, int]] = set()
    for event, _ in seen:
        told = getattr(event, "produced_tokens", None)
        if isinstance(told, dict):
            produced |= told.items()
        elif isinstance(event, ev.AttemptFailed):
            produced.add((event.stream, event.produced_tokens))
    for row in recoveries:
        options = [estimate["option"] for estimate in row["estimates"]]
        assert options
        assert len(options) == len(set(options))
        assert row["option"] in (options[0], Option.ABORT)
        if row["produced_tokens"] and row["outcome"] == "resumed":
            assert (row["stream"], row["produced_tokens"]) in produced
            assert min(row["real_s"], row["gap_s"]) > 0


async def _stop(victim: ScriptedServer, for_s: float) -> None:
    victim.freeze()
    await asyncio.sleep(for_s)
    victim.thaw()


async def _slow(victim: ScriptedServer, factor: float, for_s: float) -> None:
    for _ in range(int(for_s / SLOW_PERIOD_S)):
        victim.freeze()
        await asyncio.sleep(SLOW_PERIOD_S * (1 - 1 / factor))
        victim.thaw()
        await asyncio.sleep(SLOW_PERIOD_S / factor)


def _with_gpus(instances: dict[str, Scripted]) -> None:
    for instance in instances.values():
        instance.gpus = [instance.id]


async def scripted(row: Scenario, model: str) -> Found:
    settings: dict[str, Any] = {"nodes": row.nodes, "prepare": _with_gpus, **row.settings}
    if row.is_vllm:
        script = VllmScript(pause_s=TOKEN_S, prompt_tokens=row.load.prompt_tokens)
        settings["engine"] = lambda name, node, role: ScriptedVllm(
            name, node, role=role, script=script
        )
        settings["cluster"] = {"backend": "vllm", "model": model}
        settings["profiles"] = {"prefill": "opt-13b-a100-distserve-tp1"}
    wanted: dict[int, list[bytes]] = {}
    if row.load.fields:
        async with open_proxy_cluster(**settings) as system:
            run = Run(replace(row, faults=(), becomes=()), system)
            await run.found()
            wanted = run.answers
    async with open_proxy_cluster(**settings) as system:
        run = Run(row, system)
        found = await run.found()
    assert run.answers == wanted
    return found


def _tier(row: Scenario) -> list[pytest.MarkDecorator]:
    return [] if row.name in FIRST or row.not_simulated else [pytest.mark.nightly]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=_tier(row)) for row in ROWS if not row.not_scripted],
)
def test_row_holds_at_a_proxy_before_scripted_instances(
    row: Scenario, monkeypatch: pytest.MonkeyPatch, vllm_model: str
) -> None:
    """Each row states its own rule."""
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        monkeypatch.setattr(time, "monotonic", runner.get_loop().time)
        check(row, runner.run(scripted(row, vllm_model)))
