"""Every row of the table before a whole proxy with scripted instances, in memory and virtual time:
its ports, watches, attempts and clients are those of the product.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, assert_never

import msgspec
import pytest

from kvrs.cluster.fault_injection import views
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.faults.language import DueFault, FaultSchedule, What
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scenarios import Entry, Found, Scenario, check
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.scripted_server import ScriptedServer
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sse import events_of
from tests.proxy.backends.conftest import vllm_model as vllm_model
from tests.proxy.conftest import model as model
from tests.scenarios.rows import ROWS

TOKEN_S, PREFILL_TOKEN_S = 0.02, 0.0005
LOOK_S = 0.01
SLOW_PERIOD_S = 0.2
REFUSED = (422, "poison", "invalid_request_error")  # Other streams fail when they have begun.


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

    async def found(self) -> Found:
        load, script, entries = self._row.load, self._system.script, Entries()
        script.pause_s, script.prefill_s = TOKEN_S, PREFILL_TOKEN_S * load.prompt_tokens
        script.poisons = {f"s{number}": load.poison_at for number in load.poisons}
        self._system.proxy.parts.driver._shell._event_log = entries  # type: ignore[assignment]
        self._begin(self._carry_out_all())
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
        assert set(last.values()) <= ({"resumed", "ended"} if load.poisons else {"resumed"})
        if not load.poisons and not self._row.is_vllm:
            assert await self._system.count("kvrs_attempts_failed_total") == 0, "one event a loss"
        _look_at(state["recoveries"], seen)
        pauses_s = [row["gap_s"] for row in state["recoveries"] if row["gap_s"] is not None]
        return Found(Counter(ends), seen, never_due, pauses_s, poison_deaths)

    async def _ask(self, number: int, prompt: list[int]) -> str:
        """How the stream ended; its tokens are those of an undisturbed one."""
        load = self._row.load
        await asyncio.sleep(load.at_s(number))
        self._sent += 1
        status, body = await self._system.complete(
            prompt=prompt,
            max_tokens=load.tokens,
            temperature=0,
            stream=True,
            return_token_ids=True,
            user=f"s{number}",
        )
        if status != 200:
            error = msgspec.json.decode(body)["error"]
            assert (status, error["code"], error["type"]) == REFUSED
            return str(error["code"])
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
                    self._begin(self._kill(victim))
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

    async def _kill(self, victim: ScriptedServer) -> None:
        await victim.kill()
        await asyncio.sleep(self._row.back_s)
        await victim.restart()


def _look_at(recoveries: Sequence[Any], seen: Sequence[Entry]) -> None:
    """Each tells how far its stream was, how long it took, and one estimate of every option."""
    events = [event for event, _ in seen]
    lost = [each.produced_tokens for each in events if isinstance(each, ev.InstanceLost)]
    failed = [each for each in events if isinstance(each, ev.AttemptFailed)]
    produced = {told for each in lost for told in each.items()}
    produced |= {(each.stream, each.produced_tokens) for each in failed}
    for row in recoveries:
        options = [estimate["option"] for estimate in row["estimates"]]
        assert options
        assert len(options) == len(set(options))
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


async def scripted(row: Scenario, model: str) -> Found:
    settings: dict[str, Any] = {"nodes": row.nodes, **row.settings}
    if row.is_vllm:
        script = VllmScript(pause_s=TOKEN_S, prompt_tokens=row.load.prompt_tokens)
        settings["engine"] = lambda name, node, role: ScriptedVllm(
            name, node, role=role, script=script
        )
        settings["cluster"] = {"backend": "vllm", "model": model}
        settings["profiles"] = {"prefill": "opt-13b-a100-distserve-tp1"}
    async with open_proxy_cluster(**settings) as system:
        return await Run(row, system).found()


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if not row.not_scripted]
)
def test_row_holds_at_a_proxy_before_scripted_instances(
    row: Scenario, monkeypatch: pytest.MonkeyPatch, vllm_model: str
) -> None:
    """Each row states its own rule."""
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        monkeypatch.setattr(time, "monotonic", runner.get_loop().time)
        check(row, runner.run(scripted(row, vllm_model)))
