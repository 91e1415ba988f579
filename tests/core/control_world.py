"""`kvrs.core` and its policy in virtual time, driven by attempts, processes and agents that
behave at random; the simulator's invariants watch every event and action.

Beside what a driver reports, the policy gets what a driver must never make of it: news of former
epochs and attempts, everything twice, prompts of unknown length, wake-ups that are early or late.
Engines of every kind take part, also those that need one call for both stages and those that fetch
nothing.
"""

from collections import Counter
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec
from msgspec.structs import replace

from kvrs.config.backup import BackupSettings
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.attempt import Attempt, CallFault
from kvrs.core.books.agent_slots import SlotOutcome
from kvrs.core.control import Control
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health
from kvrs.core.model.streams import CannotContinue, Complete, Outcome
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.gpus import GpuHealth, GpuState
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    Capability,
    InstanceInfo,
    LinkReport,
    LoadReport,
    MeasuredPrefill,
    ReformingReport,
)
from kvrs.sim.invariants import Invariants
from kvrs.sim.streams import Arrival, SimJournal, SimStream
from tests.core.policy_harness import GEOMETRY, ROLES, load

PAGE = GEOMETRY.page_size_tokens
PREFILL = MeasuredPrefill("test", 100, [0.0, 0.1, 0.2, 0.3, 0.4])  # 1 ms per token
MAX_TOKENS = 100_000  # Streams end before it.
WAYS = ("reshard", "substitute")


class Engines(StrEnum):
    """Kinds of instances that a world can have."""

    OURS = "ours"  # All capabilities.
    PLAIN = "plain"  # As vLLM: prefill caches prefixes, and no instance fetches.
    SERVERS = "servers"  # p0 and d0 are one server, and a stream on both is one call; they fetch.
    SHARDED = "sharded"  # The same, and no instance fetches.

    @property
    def are_servers(self) -> bool:
        return self in (Engines.SERVERS, Engines.SHARDED)


_CAPABILITIES = {
    Engines.OURS: list(Capability),
    Engines.PLAIN: [Capability.PREFIX_CACHE],
    Engines.SERVERS: sorted(set(Capability) - {Capability.PREFIX_CACHE, Capability.SPLIT}),
    Engines.SHARDED: [Capability.FENCE, Capability.EXACT_RESUME],
}


def make_config(
    names: list[str], policy: PolicySettings, slo: SloSettings, backup: BackupSettings
) -> Config:
    nodes = sorted({name[1] for name in names})
    document = {
        "cluster": {
            "engine": {"page_size_tokens": PAGE},
            "nodes": [
                {
                    "id": f"n{digit}",
                    "instances": [
                        {"id": name, "role": ROLES[name[0]].value}
                        for name in names
                        if name[1] == digit
                    ],
                }
                for digit in nodes
            ],
        }
    }
    sections = {"policy": policy, "slo": slo, "backup": backup}
    return parse_config(document).model_copy(update=sections)


class World:
    def __init__(
        self,
        seed: int,
        names: list[str],
        settings: PolicySettings,
        slo: SloSettings,
        failure_rate: float,
        one_timer: bool,
        backup: BackupSettings | None = None,
        engines: Engines = Engines.OURS,
    ) -> None:
        self.config = make_config(names, settings, slo, backup or BackupSettings())
        self.engines = engines
        self.random = Random(seed)
        self.failure_rate = failure_rate
        self.one_timer = one_timer  # A driver may keep only the latest timer, or all of them.
        # Streams that end every instance that works on them.
        self.poisons = {StreamId("s0")} if seed % 5 == 0 else set()
        self.now_s = 0.0
        self.epochs: dict[InstanceId, int] = {InstanceId(name): 0 for name in names}
        self.nodes = {name: NodeId("n" + name[1]) for name in self.epochs}
        self.streams: dict[StreamId, SimStream] = {}
        self.log: list[tuple[ev.Event, float]] = []
        self.answers: list[list[act.Action]] = []
        self.denials = self.one_calls = self.stays = 0
        # Instances that re-form, and what they have said of it; they compute nothing.
        self._reforming: dict[InstanceId, tuple[ReformingReport, float]] = {}
        self._layouts: Counter[InstanceId] = Counter()
        self.control = Control[SimStream](
            self.config,
            run_id="test",
            shell=self,
            can_give_end=False,
        )
        agents = self.control.agents.known
        self.nodes |= {name: known.node for name, known in agents.items()}
        self.epochs |= dict.fromkeys(agents, 0)
        self.invariants = Invariants(self.config, self.nodes, self.streams)
        self._running: dict[StreamId, Attempt[SimStream]] = {}  # Their calls are answered.
        self._prefilling: set[StreamId] = set()  # Streams whose call is the prefill call.
        self._stored: dict[tuple[InstanceId, StreamId], int] = {}  # Pages, of holders that are up.
        self._agenda: list[tuple[float, int, tuple[str, object]]] = []
        self._order = count()
        self._timer = 0

    def run(self, streams: int, kills: int) -> None:
        for name in self.epochs:
            self.at(self.random.uniform(0.0, 0.2), ("up", name))
        for n in range(streams):
            self.at(self.random.uniform(0.0, 3.0), ("arrive", StreamId(f"s{n}")))
        for _ in range(kills):
            name = self.random.choice(sorted(self.epochs))
            kill = ("kill_node", self.nodes[name]) if self.random.random() < 0.2 else ("kill", name)
            self.at(self.random.uniform(0.5, 6.0), kill)
        for what in ("judge", "drain", "fence", "re_form"):
            for _ in range(kills):
                name = self.random.choice(sorted(self.epochs))
                self.at(self.random.uniform(0.5, 6.0), (what, name))
        steps = 0
        while self._agenda:
            steps += 1
            assert steps < 20_000, "the world does not come to rest"
            self.now_s, _, (what, whom) = heappop(self._agenda)
            getattr(self, f"_{what}")(whom)

    def at(self, when_s: float, what: tuple[str, object]) -> None:
        heappush(self._agenda, (max(when_s, self.now_s), next(self._order), what))

    def soon(self, what: tuple[str, object]) -> None:
        self.at(self.now_s + self.random.uniform(0.001, 0.5), what)

    def tell(self, event: ev.Event) -> None:
        """Report an event that no driver should report; the policy must ignore it."""
        self.control.tell(event, self.now_s)

    # The driver.

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        self.log.append((event, now_s))
        self.answers.append(actions)
        self.invariants.observe(now_s, event, actions)
        for action in actions:
            if isinstance(action, act.Start | act.Redirect):
                self._check_engines(action.plan)

    def _check_engines(self, plan: act.Plan) -> None:
        fetches = self.engines in (Engines.OURS, Engines.SERVERS)
        assert fetches or not plan.runs, "no instance fetches"
        own = self._own_prefill(plan.decode)
        if self.engines is Engines.SHARDED and own is not None:
            assert plan.prefill in (None, own), "it takes no other server's hand-off"

    def end_attempt(self, live: SimStream) -> None:
        self._running.pop(live.id, None)

    def expect_token(self, live: SimStream) -> None:
        self.stays += 1

    def give_end(self, live: SimStream, plan: act.Plan) -> None:
        raise AssertionError("no stream has all its tokens")

    def end_stream(self, live: SimStream, outcome: Outcome) -> None:
        assert not live.outcome, f"{live.id} ends twice"
        live.outcome = _name_of(outcome)
        self.soon(("end_again", live.id))

    def stream_closed(self, live: SimStream) -> None:
        self._prefilling.discard(live.id)

    def note(self, action: act.Record) -> None:
        pass

    def wake_at(self, at_s: float) -> None:
        self._timer += 1
        rounding_s = self.random.choice([0.0, 0.001, -0.001])
        self.at(at_s + rounding_s, ("wake", self._timer))

    def count_slot(self, outcome: SlotOutcome) -> None:
        pass

    def begin_attempt(self, live: SimStream, plan: act.Plan) -> None:
        attempt = self._running[live.id] = Attempt(self.control, live, plan)
        own = self.control.instances.known[plan.decode].own_prefill
        self.one_calls += own is not None and own == plan.prefill
        self._prefilling.discard(live.id)
        if attempt.begin() is None:
            attempt.decode()
        else:
            self._prefilling.add(live.id)
        self.soon(("advance", (live.id, live.journal.attempt)))

    # Attempts.

    def _advance(self, whom: object) -> None:
        """The attempt gets on by a stage, or breaks, or hangs until that is noticed; that of a
        poisoned stream ends its instance.
        """
        assert isinstance(whom, tuple)
        stream, live = whom[0], self.streams[whom[0]]
        if (attempt := self._running_as(whom)) is None or live.instance is None:
            return
        if live.instance in self._reforming and self.random.random() < 0.9:
            self.soon(("advance", whom))
            return
        if stream in self.poisons:
            self._kill(live.instance)
            return
        assert live.attempt.plan is not None
        if attempt.plan.runs and not attempt.has_resumed and self.random.random() < 0.2:
            self._deny(attempt)
        elif self.random.random() < self.failure_rate:
            self.at(self.now_s + self.random.choice([0.0, 5.0]), ("break", whom))
        elif stream in self._prefilling:
            self._know_prompt(live)
            self._prefilling.discard(stream)
            self._store(live)
            if attempt.prefilled(self.now_s):
                attempt.decode()
                self.soon(("advance", whom))
        else:
            self._produce(attempt)

    def _running_as(self, whom: tuple[StreamId, int]) -> Attempt[SimStream] | None:
        attempt = self._running.get(whom[0])
        return attempt if attempt is not None and attempt.number == whom[1] else None

    def _know_prompt(self, live: SimStream) -> None:
        live.journal.prompt_ids = live.journal.prompt_ids or list(live.arrival.prompt_ids)

    def _deny(self, attempt: Attempt[SimStream]) -> None:
        self.denials += 1
        denial = attempt.denial(self.random.choice([0.0, 0.05, 0.4, 3.0]))
        assert denial is not None
        self.control.attempt_over(attempt.live, denial, self.now_s)
        assert attempt.denial(1.0) is None
        self.tell(replace(denial, wait_s=1.0))  # Again, or too late.

    def _produce(self, attempt: Attempt[SimStream]) -> None:
        live = attempt.live
        self._know_prompt(live)
        reports_history = attempt.computes is not None and not attempt.has_resumed
        if not reports_history and self.random.random() < 0.4:
            self.control.end(live, Complete(), self.now_s)
            return
        for _ in range(self.random.randint(1, 40)):
            live.journal.append(0, self.now_s)
        attempt.resumed(self.now_s)
        self._store(live)
        self.soon(("advance", (live.id, attempt.number)))

    def _break(self, whom: object) -> None:
        assert isinstance(whom, tuple)
        if (attempt := self._running_as(whom)) is not None:
            fault = self.random.choice([CallFault.WRONG, CallFault.LOST])
            failed = attempt.failure(fault, "broke")
            assert failed is not None
            self.control.attempt_over(attempt.live, failed, self.now_s)
            assert attempt.failure(fault, "broke") is None
            self.tell(replace(failed, abrupt=False))

    def _end_again(self, stream: object) -> None:
        live = self.streams[StreamId(str(stream))]
        self.tell(ev.StreamEnded(live.id, live.journal.attempt))

    # Instances and agents.

    def _own_prefill(self, name: InstanceId) -> InstanceId | None:
        own = InstanceId("p" + name[1:])
        return own if self.engines.are_servers and name[0] == "d" and own in self.epochs else None

    def _info(self, name: InstanceId) -> InstanceInfo:
        known = self.control.instances.known[name]
        return InstanceInfo(
            name,
            known.node,
            known.role,
            self.epochs[name],
            self.epochs[name] // 1000,
            "model",
            "fingerprint",
            GEOMETRY,
            0,
            0,
            _CAPABILITIES[self.engines],
            PREFILL,
            self._own_prefill(name),
            gpus=[name],
        )

    def _is_up(self, name: InstanceId) -> bool:
        if name in self.control.agents.known:
            return self.control.agents.is_up(name)
        return self.control.instances.is_up(name)

    def _up(self, name: object) -> None:
        name = InstanceId(str(name))
        if self._is_up(name):
            return
        self.epochs[name] += 1000  # Another process.
        self._reforming.pop(name, None)
        if name in self.control.agents.known:
            capacity = self.random.choice([1 << 16, 1 << 22, 1 << 30])
            speed = 10 ** self.random.uniform(5, 10)
            info = AgentInfo(name, self.nodes[name], self.epochs[name], 1, 0, capacity, speed)
            known_agent = self.control.agents.known[name]
            self.control.checkpoints.up(known_agent, info, self.now_s)
            return
        known = self.control.instances.known[name]
        assert self.control.instances.fault(known, self._info(name), streams_open=True) is None
        # Memory that outlived the process before, also of streams that have ended.
        left = self.random.sample(sorted(self.control.streams), k=len(self.control.streams) // 3)
        kept = {stream: self.random.randrange(1, 9) for stream in [*left, StreamId("ended")]}
        has_kept = msgspec.structs.replace(self._info(name), kept=kept)
        self.control.instance_up(known, has_kept, self.now_s)
        self._load(name)

    def _fence(self, name: object) -> None:
        """Another proxy fences the process, which goes on in a new epoch."""
        name = InstanceId(str(name))
        if name in self.control.instances.known and self._is_up(name):
            self.epochs[name] += 1
            known = self.control.instances.known[name]
            self.control.instance_up(known, self._info(name), self.now_s)

    def _load(self, name: InstanceId, *, draining: bool = False) -> None:
        source = self.random.choice(sorted(set(self.nodes.values())))
        link = LinkReport(source, 10 ** self.random.uniform(4, 9))
        delay_s = self.random.choice([0.0, 0.3])
        report = LoadReport(
            self.epochs[name],
            0,
            0,
            0,
            delay_s,
            [link],
            draining=draining,
            reforming=self._says_of_ranks(name),
            layout_number=self._layouts[name],
            degree=2,
            full_degree=self.random.choice([2, 3]),
            replicas=self._stored_at(name),
        )
        known = self.control.instances.known[name]
        self.control.load_reported(known, report, self.now_s)

    def _says_of_ranks(self, name: InstanceId) -> ReformingReport | None:
        if name not in self._reforming:
            return None
        report, ready_s = self._reforming[name]
        return msgspec.structs.replace(report, ready_in_s=max(0.0, ready_s - self.now_s))

    def _re_form(self, name: object) -> None:
        """It has lost a rank, perhaps another one in mid-move, and goes on when it has said, before
        that or long after it, or never.
        """
        name = InstanceId(str(name))
        if name not in self.control.instances.known or not self._is_up(name):
            return
        self._layouts[name] += 1
        number, ready_in_s = self._layouts[name], self.random.choice([0.0, 0.05, 0.4, 3.0])
        streams = [live.id for live in self.control.streams.values() if live.instance == name]
        missing = {stream: self.random.randrange(9) for stream in [*streams, StreamId("ended")]}
        factor = self.random.choice([1.0, 1.5])
        way = self.random.choice(WAYS)
        report = ReformingReport(number, way, 0.0, 2, [1], 0, missing, 0.01, factor, factor)
        self._reforming[name] = report, self.now_s + ready_in_s
        self._load(name)
        whom = name, self.epochs[name] // 1000, number
        self.at(self.now_s + ready_in_s * self.random.choice([0.5, 1.0, 5.0]), ("re_formed", whom))
        self.at(self.now_s + self.random.uniform(0.0, 1.0), ("predict", whom))
        if self.random.random() < 0.2:
            self.soon((self.random.choice(["re_form", "kill"]), name))

    def _predict(self, whom: object) -> None:
        """It finds that it will take longer, perhaps in another way."""
        assert isinstance(whom, tuple)
        name, process, number = whom
        if self.epochs[name] // 1000 == process and name in self._reforming:
            report, ready_s = self._reforming[name]
            if report.number == number:
                changed = msgspec.structs.replace(report, way=self.random.choice(WAYS))
                self._reforming[name] = changed, ready_s + self.random.choice([0.1, 2.0])
                self._load(name)

    def _re_formed(self, whom: object) -> None:
        assert isinstance(whom, tuple)
        name, process, number = whom
        if self.epochs[name] // 1000 == process and self._layouts[name] == number:
            self._reforming.pop(name, None)
            if self._is_up(name):
                self._load(name)

    def _judge(self, name: object) -> None:
        name = InstanceId(str(name))
        state = self.random.choice(list(GpuState))
        gpu = GpuHealth(name, 0, state, "" if state is GpuState.HEALTHY else "xid 79", 0.0)
        self.control.gpus_seen(self.nodes[name], [gpu], self.now_s)

    def _drain(self, name: object) -> None:
        """It reports that it is draining, and ends later with whatever is still there."""
        name = InstanceId(str(name))
        if name not in self.control.instances.known or not self._is_up(name):
            return
        self.at(self.now_s + self.random.uniform(0.0, 4.0), ("kill", name))
        self.tell(load(name, epoch=self.epochs[name] - 1, draining=True))  # Of an earlier epoch.
        self._drain_on((name, self.epochs[name] // 1000))

    def _drain_on(self, whom: object) -> None:
        assert isinstance(whom, tuple)
        name, process = whom
        if self._is_up(name) and self.epochs[name] // 1000 == process:
            self.soon(("drain_on", whom))
            self._load(name, draining=True)

    def _kill_node(self, node: object) -> None:
        for name in sorted(self.epochs):
            if self.nodes[name] == node:
                self._kill(name)

    def _kill(self, name: object) -> None:
        name = InstanceId(str(name))
        if not self._is_up(name):
            return
        self.at(self.now_s + self.random.uniform(0.1, 4.0), ("up", name))
        if name in self.control.agents.known:
            self._kill_agent(name)
            return
        victims = [live for live in self.control.streams.values() if live.instance == name]
        # Connections may break a moment before the instance is known to be lost.
        for live in victims:
            if self.random.random() < 0.3:
                self._break((live.id, live.journal.attempt))
        old = [(live, live.journal.attempt) for live in victims if live.instance == name]
        self._stored = {key: pages for key, pages in self._stored.items() if key[0] != name}
        known = self.control.instances.known[name]
        self.control.instance_lost(known, "killed", self.now_s)
        assert known.health is Health.DOWN
        for live, attempt in old:
            self.tell(ev.AttemptFailed(live.id, attempt, name, "reset", len(live.output)))
        self.tell(ev.InstanceLost(name, self.epochs[name] - 1, "old news", {}))

    def _kill_agent(self, name: InstanceId) -> None:
        self._stored = {key: pages for key, pages in self._stored.items() if key[0] != name}
        self.control.checkpoints.lost(self.control.agents.known[name], "killed", self.now_s)
        self.tell(ev.HolderLost(name, self.epochs[name] - 1, "old news"))

    # Checkpoints.

    def _store(self, live: SimStream) -> None:
        """The instance has sent pages to the holders of its plan; sometimes these report it."""
        assert live.attempt.plan is not None
        for place in live.attempt.plan.places:
            agent = place.holder
            if not self._is_up(agent):
                continue
            had = self._stored.get((agent, live.id), 0)
            most = max(had, live.true_history_tokens // PAGE)
            self._stored[agent, live.id] = self.random.randint(had, most)
            if self.random.random() < 0.8:
                self.soon(("report", agent))

    def _report(self, agent: object) -> None:
        """All that it has, also of streams that are over or have been moved elsewhere."""
        agent = InstanceId(str(agent))
        if not self._is_up(agent):
            return
        if agent not in self.control.agents.known:  # A peer, which has given up some.
            for key in [key for key in self._stored if key[0] == agent]:
                self._stored[key] = self.random.randint(0, self._stored[key])
            self._load(agent)
            return
        pages = self._stored_at(agent)
        reserved = self.random.randint(0, 1 << 20)
        report = AgentReport(self.epochs[agent], reserved, reserved, len(pages), pages)
        self.control.checkpoints.reported(self.control.agents.known[agent], report, self.now_s)
        old = dict.fromkeys(pages, 1000)
        self.tell(ev.CheckpointsReported(agent, self.epochs[agent] - 1, 0, 0, old))

    def _stored_at(self, holder: InstanceId) -> dict[StreamId, int]:
        return {stream: held for (name, stream), held in self._stored.items() if name == holder}

    # Streams.

    def _arrive(self, stream: object) -> None:
        stream = StreamId(str(stream))
        prompt = tuple([0] * self.random.randint(1, 500))
        arrival = Arrival(0.0, prompt, MAX_TOKENS, is_keyed=self.random.random() < 0.3)
        knows_prompt = self.random.random() < 0.5
        guess = 1 if self.random.random() < 0.5 else len(prompt)
        journal = SimJournal(stream, arrival, self.now_s, guess)
        journal.prompt_ids = list(prompt) if knows_prompt else None
        journal.deadlines = ev.Deadlines(
            *(self.random.choice([None, None, 0.1, 5.0]) for _ in "abc")
        )
        if self.random.random() < 0.25:
            self._adopt(journal)
        live = self.streams[stream] = SimStream(journal=journal)
        self.control.open(live, self.now_s)
        if self.random.random() < 0.1:
            self.soon(("forget_pages", stream))

    def _adopt(self, journal: SimJournal) -> None:
        """It comes from another proxy, which knew of some of its pages, as they are or as they were
        in an earlier epoch.
        """
        journal.owner_epoch, journal.prompt_ids = 1, list(journal.arrival.prompt_ids)
        journal.taken_ids = [0] * self.random.choice([0, self.random.randint(1, 200)])
        journal.arrived_s = self.now_s - self.random.choice([0.0, 0.05, 4.0])
        history_tokens = len(journal.prompt_ids) + len(journal.output_ids)
        kept = [ev.Kept(InstanceId("x9"), 1, 1)]
        for name in self.random.sample(sorted(self.epochs), k=min(3, len(self.epochs))):
            epoch, pages = self.epochs[name], self.random.randint(0, history_tokens // PAGE)
            if name in self.control.agents.known and self._is_up(name):
                self._stored[name, journal.stream] = pages
            kept.append(ev.Kept(name, epoch, pages))
            if self.random.random() < 0.3:
                kept.append(ev.Kept(name, epoch - 1, history_tokens // PAGE))
        self.random.shuffle(kept)
        journal.kept = tuple(kept)

    def _forget_pages(self, stream: object) -> None:
        live = self.streams[StreamId(str(stream))]
        for instance in sorted(live.prefilled_at):
            self.control.retention_lost(instance, [live.id], self.now_s)
            self.tell(ev.RetentionLost(instance, (live.id,)))

    def _wake(self, timer: object) -> None:
        if timer == self._timer or not self.one_timer:
            self.tell(ev.TimerFired())


def _name_of(outcome: Complete | act.GiveUp | CannotContinue) -> str:
    match outcome:
        case Complete():
            return "complete"
        case act.GiveUp():
            return outcome.reason.value
        case CannotContinue():
            raise AssertionError("greedy streams continue exactly")
