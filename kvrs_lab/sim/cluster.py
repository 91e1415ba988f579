"""The processes of a simulated cluster: instances, agents, proxies, and the links between them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import msgspec

from kvrs.config.file import Config
from kvrs.config.proxy import PeerSettings
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import SHARE_S
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.catalog import kv_geometry
from kvrs.protocol.pages import root_tag
from kvrs_lab.sim.agent import SimAgent
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.hosts import SimHost
from kvrs_lab.sim.invariants import Grants
from kvrs_lab.sim.links import SimLinks
from kvrs_lab.sim.pipelines import SimPipeline
from kvrs_lab.sim.probing import Probing
from kvrs_lab.sim.process import Clock
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.rank_model import PipelineModel, RankModel
from kvrs_lab.sim.recovering import SimDraftModel, SimHelper
from kvrs_lab.sim.site import InstancePace, SimHolder, Site, StreamTally
from kvrs_lab.sim.streams import SimJournal, SimStream

PACE = "opt-13b-a100-distserve-tp1"  # Default profile.
POISONED = "a poisoned request"
BETWEEN_PROXIES_S = 0.001  # Delay of a message.
MOVED, CUT = "moved", "cut off with its proxy"  # Ends of streams whose proxy died.


@dataclass(frozen=True, slots=True)
class CarriedOutFault:
    """One fault that was carried out."""

    death: str
    at_s: float
    whom: str
    streams: int  # Streams that depended on the victim.
    instances: tuple[InstanceId, ...] = ()  # The victims; empty: only `whom`, or none.


@dataclass(slots=True)
class Outcome:
    """The outcome of one simulated run."""

    ended: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)  # Streams by reason, with the message.
    recoveries: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)  # Events of all policies, by kind.
    actions: Counter[str] = field(default_factory=Counter)
    recovered_streams: int = 0
    pauses_s: list[float] = field(default_factory=list)
    hits: list[CarriedOutFault] = field(default_factory=list)
    never_due: list[str] = field(default_factory=list)
    dropped_tokens: int = 0  # Tokens of attempts that were over.
    slot_denials: int = 0  # Denials by agents because other proxies had the slots.
    local_grants: int = 0  # Slots that a proxy granted to itself because no agent answered.
    adopted: int = 0  # Streams that continued at another proxy.
    poison_deaths: Counter[StreamId] = field(default_factory=Counter)  # Deaths by poisoned request.
    innocents_refused: int = 0  # Streams that were refused as poison, but had ended nothing.
    innocents_lost: int = 0  # Accepted streams, not poisoned, that were lost for any reason.
    tokens: int = 0
    prompt_tokens: int = 0  # Tokens of prompts that prefill instances have answered.
    cached_tokens: int = 0  # Prompt tokens that were found in prefix caches.
    span_s: float = 0.0
    steps: int = 0


class SimCluster:
    def __init__(
        self,
        config: Config,
        *,
        seed: int,
        proxies: int,
        stay_away: float,
        reload_s: float | None = None,
        load_s: float = 0.0,
        probes: bool = False,
        is_supervised: bool = False,
        keep_log: bool,
        rank_model: RankModel | None = None,
        pipeline_model: PipelineModel | None = None,
        draft_model: SimDraftModel | None = None,
        first_token: FirstToken = FirstToken.DECODE,
    ) -> None:
        """Create the processes, without starting them. `stay_away`: probability that a killed
        process is away for 20 s or more; `reload_s` fixes the time, else `load_s` is added for an
        instance. `probes`: of links. `is_supervised`: proxies learn the cause of a death soon.
        `draft_model`: a restarted instance loads it first, and drafts for another one.
        """
        self.rng = Random(seed)
        self._exits_rng = Random(f"{seed} exits") if is_supervised else None
        self.clock = Clock()
        config = _complete(config, proxies)
        profile = config.cluster.engine.pace or PACE
        geometry = msgspec.structs.replace(
            kv_geometry(profile), page_size_tokens=config.cluster.engine.page_size_tokens
        )
        backup = config.backup
        rate = config.transfer.link_bytes_per_s or config.policy.assumed_link_bytes_per_s
        self.links = SimLinks(
            self.clock, rate, backup.host_to_device_bytes_per_s, config.transfer.stall_timeout_s
        )
        pipelines = pipeline_model or PipelineModel()
        self._site = site = Site(
            config,
            self.clock,
            self.links,
            InstancePace.of(profile, config.cluster.engine),
            geometry,
            root_tag("simulated"),
            rank_model or RankModel(),
            pipelines,
            hosts_of(config, self.clock, pipelines),
            first_token,
        )
        self.engines = {
            instance.id: SimEngine(instance.id, node.id, instance.role, site, instance.ranks)
            for node, instance in config.cluster.instances()
        }
        nodes = config.cluster.nodes if backup.at_agents else []
        for engine in self.engines.values():
            engine.poisoned = partial(self._poisoned, engine)
            engine.given_up = partial(self.kill, engine, with_node=False, is_external=False)
        self.agents = {node.agent_id: SimAgent(node.agent_id, node.id, site) for node in nodes}
        for agent in self.agents.values():
            agent.slot_ended = lambda asked: self._grants.released(asked)
        site.holders.update(self.engines)
        site.holders.update(self.agents)
        self._grants = Grants(config.policy.slots_max)
        self._keep_log = keep_log
        self.proxies: list[SimProxy] = []  # Dead proxies included.
        self.serving = [self.new_proxy() for _ in range(proxies)]
        self._stay_away, self._reload_s, self._load_s = stay_away, reload_s, load_s
        self._probing = dict[InstanceId, Probing]() if probes else None
        self.draft_model = draft_model
        self.outcome = Outcome()
        self.log: list[str] = []  # Events of processes, for people and for comparison.

    def begin(self) -> None:
        """Start all instances, agents and proxies."""
        for holder in (*self.engines.values(), *self.agents.values()):
            self._start(holder)
        for proxy in self.serving:
            proxy.begin()

    def _start(self, holder: SimHolder) -> None:
        holder.start()
        if self._probing is not None and isinstance(holder, SimEngine):
            probing = Probing(holder, list(self.holders.values()), self._site)
            self._probing[holder.id] = probing
            probing.begin()

    def end_probes(self) -> None:
        """Let no further probe begin."""
        for probing in (self._probing or {}).values():
            probing.end()

    def close(self) -> None:
        """End all tasks at the end of the world."""
        for proxy in self.proxies:
            proxy.time.end()
        for engine in self.engines.values():
            engine.loop.close()

    @property
    def config(self) -> Config:
        return self._site.config

    @property
    def tally(self) -> StreamTally:
        return self._site.tally

    @property
    def holders(self) -> dict[InstanceId, SimHolder]:
        """All instances and agents."""
        return self._site.holders

    @property
    def hosts(self) -> list[SimHost]:
        """All hosts of stages."""
        return [host for each in self._site.hosts.values() for host in each]

    def host_of(self, name: InstanceId, stage: int) -> SimHost:
        """The host that has the stage of the instance, or else the instance's own host."""
        ranks = self.engines[name].ranks
        assert isinstance(ranks, SimPipeline)
        return ranks.host_of(stage)

    def new_proxy(self) -> SimProxy:
        proxy = SimProxy(
            f"proxy{len(self.proxies)}",
            self._site,
            self._grants,
            self.rng,
            keep_log=self._keep_log,
            lost=self._gossip_loss,
        )
        self.proxies.append(proxy)
        if self.config.proxy.peers:
            proxy.after(SHARE_S, self._share, proxy)
        return proxy

    def any_engine(self) -> SimEngine | None:
        running = [engine for engine in self.engines.values() if engine.is_running]
        return self.rng.choice(running) if running else None

    def running_proxies(self) -> list[SimProxy]:
        return [each for each in self.serving if each.is_alive and not each.time.is_frozen]

    def streams_on(self, name: InstanceId) -> int:
        return sum(
            name in (live.instance, *holders_of(live))
            for proxy in self.running_proxies()
            for live in open_streams(proxy)
        )

    def kill(self, holder: SimHolder, *, with_node: bool, is_external: bool = True) -> None:
        """Kill a process. `with_node` also loses the node's memory, and no kernel resets
        connections.
        """
        if isinstance(holder, SimEngine) and holder.alive and self._exits_rng is not None:
            exited = ev.InstanceExited(holder.id, holder.epoch, "it has ended", is_external)
            for proxy in self.running_proxies():
                tell = partial(self._tell, proxy, exited)
                proxy.after(self._exits_rng.uniform(0.001, 0.4), tell)
        if isinstance(holder, SimEngine):
            holder.kill(silently=with_node)
        else:
            holder.kill()
        if with_node and isinstance(holder, SimAgent):
            holder.lose_memory()
        self.links.drop(holder)
        for host in self.hosts if with_node else ():
            if host.node == holder.node:
                host.kill()
        if not with_node:
            for proxy in self.serving:
                if proxy.is_alive:
                    proxy.fleet.backend(holder.id).reset()
        back_s = self._back_s(holder, with_node=with_node)
        if self.draft_model is not None and isinstance(holder, SimEngine):
            draft = self.draft_model
            if self.config.state_plane.enabled and not with_node:
                draft = draft.kept
            back_s = self._help(holder, draft, back_s)
        self.clock.after(back_s, partial(self._bring_back, holder, holder.life))

    def _back_s(self, holder: SimHolder, *, with_node: bool) -> float:
        """Draw the time until a killed process is back, without that of a draft model."""
        back_s = (
            self.rng.uniform(20.0, 60.0)
            if self.rng.random() < self._stay_away
            else self.rng.uniform(0.2, 4.0)
        )
        if self._reload_s is not None:
            return self._reload_s
        if not isinstance(holder, SimEngine):
            return back_s
        # The node's agent keeps the weights of an instance of one process.
        is_kept = self.config.state_plane.enabled and holder.ranks is None and not with_node
        return back_s if is_kept else back_s + self._load_s

    def _help(self, engine: SimEngine, model: SimDraftModel, back_s: float) -> float:
        """Let a restarted instance make drafts until its own model is read. Return the delay until
        the instance is back, which includes the time to read the draft model.
        """
        helper = SimHelper(engine.id, self.engines, model, self.config, self.clock)
        if not helper.is_wanted:
            return back_s
        helper.begin()
        back_s += model.read_s
        self.clock.after(max(model.load_s, back_s - self._site.pace.pace.load_s), helper.end)
        return back_s

    def _tell(self, proxy: SimProxy, event: ev.Event) -> None:
        proxy.control.tell(event, self.clock.now_s)

    def _bring_back(self, holder: SimHolder, life: int) -> None:
        if not holder.alive and holder.life == life:
            self._start(holder)
            self.log.append(f"{self.clock.now_s:.6f} {holder.id} is back")

    def wake(self, holder: SimHolder, life: int) -> None:
        if holder.alive and holder.frozen and holder.life == life:
            self.log.append(f"{self.clock.now_s:.6f} {holder.id} wakes")
            holder.wake()
            self.links.look()

    def end(self, engine: SimEngine, life: int) -> None:
        if engine.alive and engine.life == life:
            self.kill(engine, with_node=False)

    def _poisoned(self, engine: SimEngine, stream: StreamId) -> None:
        self.note(POISONED, engine.id, self.streams_on(engine.id))
        self.outcome.poison_deaths[stream] += 1
        self.kill(engine, with_node=False, is_external=False)

    def _gossip_loss(self, finder: SimProxy, name: InstanceId, epoch: int) -> None:
        """Gossip a loss that one proxy has found to the other proxies."""
        if self._site.config.gossip.enabled:
            for proxy in self.running_proxies():
                if proxy is not finder:
                    died = partial(proxy.fleet.gossip.died, name, epoch)
                    proxy.after(self.rng.uniform(0.02, 1.0), died)

    def _share(self, sender: SimProxy) -> None:
        """Tell the other proxies at intervals what the sender has sent where."""
        sent = sender.control.policy.take_sent()
        for proxy in self.serving if sent else ():
            if proxy is not sender and proxy.is_alive:
                proxy.after(BETWEEN_PROXIES_S, proxy.control.policy.sent_elsewhere, sent)
        sender.after(SHARE_S, self._share, sender)

    def note(
        self, death: str, whom: str, streams: int, instances: tuple[InstanceId, ...] = ()
    ) -> None:
        hit = CarriedOutFault(death, self.clock.now_s, whom, streams, instances)
        self.outcome.hits.append(hit)
        self.log.append(f"{self.clock.now_s:.6f} {death}: {whom}, {streams} streams")


def hosts_of(config: Config, clock: Clock, model: PipelineModel) -> dict[InstanceId, list[SimHost]]:
    """The hosts of each instance that has a host for each stage."""
    return {
        instance.id: [
            SimHost(instance.id, stage, place.node, clock, model.load_s)
            for stage, place in instance.remote_stages.items()
        ]
        for _, instance in config.cluster.instances()
        if instance.stage_hosts and not instance.own_stages
    }


def _complete(config: Config, proxies: int) -> Config:
    """Add the peers of a simulated proxy to the configuration."""
    peers = [PeerSettings(id=f"peer{n}", peer_port=n + 1) for n in range(proxies - 1)]
    return config.model_copy(
        update={
            "proxy": config.proxy.model_copy(update={"peers": peers}),
        }
    )


def holders_of(live: SimStream) -> list[InstanceId]:
    """Instances and agents that may hold pages of the stream."""
    copies = [agent for agent, copy in live.copies.items() if copy.pages]
    return [*live.prefilled_at, *copies, *live.replicas]


def mirrored(live: SimStream, proxy: SimProxy, rng: Random) -> SimJournal:
    """The state of the stream at the proxy's mirror. The last tokens may be missing, and the
    holders may be out of date.
    """
    journal = live.journal
    lag = rng.choice([0, 0, 1, 3])
    kept = proxy.control.policy.kept(live.id)
    journal.close_part()
    journal.is_mirrored = True
    return replace(
        journal,
        taken_ids=journal.taken_ids[: max(0, len(journal.taken_ids) - lag)],
        owner_epoch=journal.owner_epoch + 1,
        attempt=0,
        kept=tuple(each for each in kept if rng.random() < 0.9),
    )


def open_streams(proxy: SimProxy) -> Iterator[SimStream]:
    return (live for live in proxy.streams.values() if not live.outcome)
