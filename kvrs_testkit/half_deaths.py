"""Processes that are half dead: they live for some and not for others, or do one thing and not the
other.
"""

from functools import partial

from kvrs_lab.sim.cluster import MOVED, SimCluster, holders_of, mirrored, open_streams
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.streams import SimStream
from kvrs_testkit import death_scenarios

LONGEST_S = 9.0
PATIENCE_S = 9.0  # Of the most patient clients of a proxy that says nothing.


class HalfDeaths:
    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.moving = 0  # Streams that their clients are about to resume.

    def strike(self, name: str) -> bool:
        """Apply the fault if it is one of these; False: it is not."""
        match name:
            case death_scenarios.HUNG:
                self._hang()
            case death_scenarios.CUT_OFF:
                self._cut_off()
            case death_scenarios.PROXY_FROZEN:
                self._freeze_proxy()
            case death_scenarios.PAGES_STALL:
                self._stall_pages()
            case death_scenarios.ONE_WAY:
                self._cut_one_way()
            case _:
                return False
        return True

    def _for_s(self) -> float:
        return self._cluster.rng.uniform(0.3, LONGEST_S)

    def _hang(self) -> None:
        """It reports and takes calls, and computes nothing; then it does, or its process ends."""
        cluster = self._cluster
        engine = cluster.any_engine()
        if engine is None:
            return
        cluster.note(death_scenarios.HUNG, engine.id, cluster.streams_on(engine.id))
        engine.hangs = True
        then = self._compute_again if cluster.rng.random() < 0.5 else cluster.end
        cluster.clock.after(self._for_s(), partial(then, engine, engine.life))

    def _compute_again(self, engine: SimEngine, life: int) -> None:
        if engine.alive and engine.life == life:
            engine.hangs = False
            engine.later(0.0, engine.look)

    def _cut_off(self) -> None:
        """Nothing passes between one proxy and one instance; all others reach both. What was sent
        meanwhile arrives when it is over.
        """
        cluster = self._cluster
        engine, proxies = cluster.any_engine(), cluster.running_proxies()
        if engine is None or not proxies:
            return
        proxy = cluster.rng.choice(proxies)
        hit = sum(engine.id in (live.instance, *holders_of(live)) for live in open_streams(proxy))
        cluster.note(death_scenarios.CUT_OFF, f"{proxy.name} of {engine.id}", hit)
        proxy.cut_until_s[engine.id] = cluster.clock.now_s + self._for_s()

    def _stall_pages(self) -> None:
        """The page port of an instance or agent takes connections and answers nothing."""
        cluster = self._cluster
        holders = [each for each in cluster.holders.values() if each.is_running]
        if not holders:
            return
        holder = cluster.rng.choice(holders)
        cluster.note(death_scenarios.PAGES_STALL, holder.id, cluster.streams_on(holder.id))
        holder.stalls_until_s = cluster.clock.now_s + self._for_s()

    def _cut_one_way(self) -> None:
        cluster = self._cluster
        nodes = list(dict.fromkeys(holder.node for holder in cluster.holders.values()))
        source, target = cluster.rng.sample(nodes, 2)
        hit = sum(
            cluster.streams_on(name)
            for name, holder in cluster.holders.items()
            if holder.node == source
        )
        cluster.note(death_scenarios.ONE_WAY, f"{source} to {target}", hit)
        cluster.links.cut(source, target, self._for_s(), one_way=True)

    def _freeze_proxy(self) -> None:
        """Clients wait for it, or resume keyed streams at another proxy; then it wakes, and goes on
        with what it was doing until it reads that they have left.
        """
        cluster, rng = self._cluster, self._cluster.rng
        running = cluster.running_proxies()
        if not running:
            return
        proxy = rng.choice(running)
        open_ = list(open_streams(proxy))
        cluster.note(death_scenarios.PROXY_FROZEN, proxy.name, len(open_))
        proxy.time.freeze()
        others = [other for other in running if other is not proxy]
        for_s = self._for_s()
        for live in open_:
            patience_s = rng.uniform(0.2, PATIENCE_S)
            if others and live.journal.resumable and patience_s < for_s:
                self.moving += 1
                cluster.clock.after(patience_s, partial(self._move, proxy, live))
        cluster.clock.after(for_s, proxy.time.wake)

    def _move(self, proxy: SimProxy, live: SimStream) -> None:
        self.moving -= 1
        cluster = self._cluster
        others = [other for other in cluster.running_proxies() if other is not proxy]
        if not others:
            return  # The client waits on.
        proxy.after(0.0, partial(_leave, proxy, live))
        cluster.rng.choice(others).adopt(mirrored(live, proxy, cluster.rng))
        cluster.outcome.adopted += 1


def _leave(proxy: SimProxy, live: SimStream) -> None:
    """The proxy reads that the client has closed its connection."""
    proxy.settle(live, MOVED)
    proxy.control.close(live, proxy.now_s)
