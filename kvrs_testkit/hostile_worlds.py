"""Worlds drawn at random, with engines of every kind, whose proxies report what no driver should:
news of former epochs and attempts, everything twice, and wake-ups that are early, late or not due.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from random import Random

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, InstanceInfo, Role
from kvrs_lab.sim.cluster import SimCluster, open_streams
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.process import require
from kvrs_lab.sim.proxy import SimProxy, SimShell
from kvrs_lab.sim.world import World
from kvrs_testkit.random_worlds import contended, drawn_world, peers, random_config

ENDED = StreamId("ended")  # No proxy has it any more.


class EngineKind(StrEnum):
    """Kinds of instances that a world can have."""

    OURS = "ours"  # All capabilities.
    PLAIN = "plain"  # As vLLM: prefill caches prefixes, and no instance fetches.
    SERVERS = "servers"  # Two instances of a node are one server: a stream on both is one call.
    SHARDED = "sharded"  # The same, and no instance fetches.


_CAPABILITIES = {
    EngineKind.OURS: list(Capability),
    EngineKind.PLAIN: [Capability.PREFIX_CACHE],
    EngineKind.SERVERS: sorted(set(Capability) - {Capability.PREFIX_CACHE, Capability.SPLIT}),
    EngineKind.SHARDED: [Capability.FENCE, Capability.EXACT_RESUME],
}


def as_vllm(info: InstanceInfo) -> InstanceInfo:
    """A decode instance computes prompts itself."""
    return msgspec.structs.replace(
        info,
        capabilities=_CAPABILITIES[EngineKind.PLAIN],
        computes_prompts=info.role is Role.DECODE,
    )


def hostile(seed: int, seen: Counter[str] | None = None, *, keep_log: bool = False) -> World:
    """In each sixteenth of them proxies contend for slots, in another one peers have replicas.
    `seen` counts what plans are like.
    """
    rng = Random(f"hostile {seed}")
    if seed % 16 in (7, 15):
        world = (peers if seed % 16 == 7 else contended)(seed, keep_log=keep_log)
    else:
        config = random_config(rng, seed)
        recovery = config.policy.recovery.model_copy(update={"poison_deaths": rng.randint(2, 5)})
        policy = config.policy.model_copy(update={"recovery": recovery})
        config = config.model_copy(update={"policy": policy})
        world = drawn_world(rng, config, seed, keep_log=keep_log)
    kind = list(EngineKind)[(seed + seed // 16) % len(EngineKind)]
    world.arrivals = [
        replace(
            asked,
            is_poison=number == 0 and seed % 5 == 0,
            deadlines=ev.Deadlines(*(rng.choice([None, None, 0.1, 5.0]) for _ in "abc")),
        )
        for number, asked in enumerate(world.arrivals)
    ]
    for engine in world.cluster.engines.values():
        own = _own_prefill(world.cluster, engine, kind)
        keeps: dict[int, dict[StreamId, int]] = {}
        engine.declares = partial(_declare, world.cluster, rng, kind, own, keeps)
    for proxy in world.cluster.serving:
        shell = HostileShell(proxy, rng, Counter() if seen is None else seen)
        proxy.control._shell, proxy.control._trace = shell, shell.trace
    return world


def _own_prefill(cluster: SimCluster, engine: SimEngine, kind: EngineKind) -> InstanceId | None:
    if kind not in (EngineKind.SERVERS, EngineKind.SHARDED) or engine.role is not Role.DECODE:
        return None
    others = (each for each in cluster.engines.values() if each.node == engine.node)
    return next((each.id for each in others if each.role is Role.PREFILL), None)


def _declare(
    cluster: SimCluster,
    rng: Random,
    kind: EngineKind,
    own: InstanceId | None,
    keeps: dict[int, dict[StreamId, int]],
    info: InstanceInfo,
) -> InstanceInfo:
    """Return what an instance of this kind declares, with memory that has outlived the process
    before: some of its pages are not there any more, and some are of streams that have ended.
    """
    if info.pid not in keeps:
        proxies = cluster.running_proxies()
        streams = sorted(live.id for proxy in proxies for live in open_streams(proxy))
        left = rng.sample(streams, k=len(streams) // 3)
        keeps[info.pid] = {stream: rng.randrange(1, 9) for stream in [*left, ENDED]}
    if kind is EngineKind.PLAIN:
        return as_vllm(info)
    return msgspec.structs.replace(
        info, capabilities=_CAPABILITIES[kind], own_prefill=own, kept=keeps[info.pid]
    )


class HostileShell(SimShell):
    def __init__(self, proxy: SimProxy, rng: Random, seen: Counter[str]) -> None:
        super().__init__(proxy)
        self._rng = rng
        self._seen = seen
        self._keeps_one_timer = rng.random() < 0.5  # The latest one; or all of them.
        self._timer = 0
        self._untrue: deque[ev.Event] = deque()  # What was reported and has not come yet.

    def wake_at(self, at_s: float) -> None:
        self._timer += 1
        rounding_s = self._rng.choice([0.0, 0.001, -0.001])
        self.proxy.after(at_s - self.proxy.now_s + rounding_s, self._woken, self._timer)

    def _woken(self, timer: int) -> None:
        if timer == self._timer or not self._keeps_one_timer:
            self._wake()

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        super().trace(now_s, event, actions)
        for action in actions:
            if isinstance(action, act.Start | act.Redirect):
                self._check_plan(action.plan)
            elif isinstance(action, act.Recovered):
                self._seen["cached"] += any(each.by_prefill for each in action.estimates)
        if self._untrue and event is self._untrue[0]:
            self._untrue.popleft()
            return
        for untrue in self._untrue_news(event):
            self._untrue.append(untrue)
            self.proxy.control.tell(untrue, now_s)

    def _check_plan(self, plan: act.Plan) -> None:
        """Nothing is asked of an engine that it does not offer."""
        info = self.proxy.engine(plan.decode).info()
        pulls, own = Capability.PULL_PAGES in info.capabilities, info.own_prefill
        require(pulls or not plan.runs, f"{plan.decode} is to fetch, and does not")
        require(
            pulls or own is None or plan.prefill in (None, own),
            f"{plan.decode} is to take the hand-off of another server",
        )
        self._seen["one call"] += own is not None and own == plan.prefill
        self._seen["combined"] += len(plan.runs) > 1
        self._seen["protected"] += bool(plan.places)

    def _untrue_news(self, event: ev.Event) -> Iterator[ev.Event]:
        change = msgspec.structs.replace
        match event:
            case ev.StreamEnded() | ev.RetentionLost():
                yield event
            case ev.SlotDenied():
                yield change(event, wait_s=1.0)
            case ev.AttemptFailed():
                yield change(event, abrupt=False)
            case ev.InstanceLost(instance=name, epoch=epoch, produced_tokens=produced):
                for stream, tokens in produced.items():
                    attempt = self.proxy.streams[stream].journal.attempt
                    yield ev.AttemptFailed(stream, attempt, name, "reset", tokens)
                yield ev.InstanceLost(name, epoch - 1, "old news", {})
            case ev.InstanceUp(info=info):
                yield ev.InstanceLost(info.id, info.epoch - 1, "old news", {})
            case (
                ev.HolderUp(holder=holder, epoch=epoch) | ev.HolderLost(holder=holder, epoch=epoch)
            ):
                yield ev.HolderLost(holder, epoch - 1, "old news")
            case ev.CheckpointsReported(epoch=epoch):
                every = dict.fromkeys(self.proxy.control.streams, 1000)
                yield change(event, epoch=epoch - 1, pages=every)
            case ev.LoadReported(report=report) if self._rng.random() < 0.1:
                yield change(event, report=change(report, epoch=report.epoch - 1, draining=True))
            case _:
                pass  # Twice it is still true, or it comes at random moments anyway.
