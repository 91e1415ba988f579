"""A small world in virtual time that carries out what the policy asks for, breaks things, and watches the laws.

It knows what is really up, who really holds which pages and which transfers really run, so it can tell when the
policy asks for something that it must not.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Action, GiveUp, Halt, Place, Plan, Recovered, Redirect, Run, Settled, Start, WakeAt
from kvrs.policy.config import PolicySettings, SloSettings
from kvrs.policy.events import (
    AttemptFailed,
    CheckpointsReported,
    Deadlines,
    DrainReported,
    Event,
    GpuJudged,
    HolderLost,
    HolderUp,
    InstanceLost,
    InstanceUp,
    Kept,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    RetentionLost,
    SlotDenied,
    StreamAdopted,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.policy.timers import SLACK_S
from kvrs.protocol.gpus import GpuState
from kvrs.protocol.instance import Capability
from tests.policy.policy_stories import GEOMETRY, instance

PAGE = GEOMETRY.page_size_tokens


class Engines(StrEnum):
    """What the instances of a world are."""

    OURS = "ours"  # They can everything.
    PLAIN = "plain"  # As vLLM: prefill caches prefixes, and nobody fetches.
    SERVERS = "servers"  # p0 and d0 are one server, and a stream on both is one call; they fetch.
    SHARDED = "sharded"  # The same, and nobody fetches.

    @property
    def are_servers(self) -> bool:
        return self in (Engines.SERVERS, Engines.SHARDED)


_CAPABILITIES = {
    Engines.OURS: frozenset(Capability),
    Engines.PLAIN: frozenset({Capability.PREFIX_CACHE}),
    Engines.SERVERS: frozenset(Capability) - {Capability.PREFIX_CACHE, Capability.SPLIT},
    Engines.SHARDED: frozenset({Capability.FENCE, Capability.EXACT_RESUME}),
}


@dataclass(slots=True)
class Client:
    """One stream as the world sees it."""

    prompt_tokens: int
    produced_tokens: int = 0
    attempt: int = 0
    plan: Plan | None = None
    at_prefill: bool = False
    one_call: bool = False  # Of both stages: it goes to the decode instance, and is lost with either.
    knows_prompt: bool = False  # The proxy has its ids: they come from its first prefill.
    broken: bool = True  # Its attempt is over for whatever reason, or there was none.
    fetching_since_s: float | None = None
    outcome: str = ""
    held: dict[InstanceId, tuple[int, int]] = field(default_factory=dict)  # Epoch, pages; of instances.
    stored: dict[InstanceId, tuple[int, int]] = field(default_factory=dict)  # The same of agents.
    told: dict[InstanceId, tuple[int, int]] = field(default_factory=dict)  # What of it agents have reported.

    @property
    def runs_on(self) -> InstanceId | None:
        if self.plan is None or self.outcome:
            return None
        return self.plan.prefill or self.plan.decode if self.at_prefill else self.plan.decode

    def is_lost_with(self, name: InstanceId) -> bool:
        if self.runs_on == name:
            return True
        return (
            self.runs_on is not None and self.at_prefill and self.one_call and self.plan is not None and self.plan.decode == name
        )

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.produced_tokens


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
        self.engines = engines
        self.backup = backup or BackupSettings()
        self.policy = RecoveryPolicy(settings, slo, self.backup)
        self.settings = settings
        self.slo = slo
        self.random = Random(seed)
        self.failure_rate = failure_rate
        self.one_timer = one_timer  # A driver may keep only the latest timer, or all of them.
        self.now_s = 0.0
        self.epochs: dict[InstanceId, int] = {InstanceId(name): 0 for name in names}
        self.nodes = {name: NodeId("n" + name[1]) for name in self.epochs}
        if self.backup.mode is not BackupMode.OFF:
            agents = {InstanceId(f"agent-{node}"): node for node in self.nodes.values()}
            self.nodes |= agents
            self.epochs |= dict.fromkeys(agents, 0)
        self.up: set[InstanceId] = set()
        self.leaving: set[InstanceId] = set()  # Of these, who was told to end and has not yet.
        self.clients: dict[StreamId, Client] = {}
        self.log: list[tuple[Event, float]] = []
        self.answers: list[list[Action]] = []
        self.denials = 0
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
        for _ in range(kills):
            name = self.random.choice(sorted(self.epochs))
            if not name.startswith("agent"):
                self.at(self.random.uniform(0.5, 6.0), ("judge", (name, self.random.choice(list(GpuState)))))
        for _ in range(kills):
            self.at(self.random.uniform(0.5, 6.0), ("drain", self.random.choice(sorted(self.epochs))))
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

    def tell(self, event: Event) -> None:
        actions = self.policy.handle(event, self.now_s)
        self.log.append((event, self.now_s))
        self.answers.append(actions)
        for action in actions:
            match action:
                case Start():
                    self._carry_out(action)
                case Redirect():
                    client = self.clients[action.stream]
                    # Only what just came out of prefill, and only where it goes to.
                    assert isinstance(event, PrefillDone)
                    assert (action.stream, action.attempt) == (event.stream, event.attempt) == (event.stream, client.attempt)
                    assert client.plan is not None
                    assert action.plan.prefill == client.plan.prefill
                    assert not client.one_call, "what is one call decodes already"
                    self._check_plan(client, action.plan)
                    client.plan = action.plan
                case Halt():
                    client = self.clients[action.stream]
                    assert client.attempt == action.attempt
                    assert isinstance(event, GpuJudged | DrainReported | PrefillDone)
                    left = self.leaving if isinstance(event, PrefillDone) else {event.instance}
                    assert any(client.is_lost_with(name) for name in left), "it runs elsewhere"
                    client.broken, client.fetching_since_s = True, None
                case Recovered() | Settled():
                    assert self.clients[action.stream].attempt == action.attempt
                case GiveUp():
                    client = self.clients[action.stream]
                    assert not client.outcome
                    client.outcome = action.reason.value
                    self.soon(("end_late", action.stream))
                case WakeAt():
                    self._timer += 1
                    rounding_s = self.random.choice([0.0, 0.001, -0.001])
                    self.at(action.at_s + rounding_s, ("wake", self._timer))
        # The law of slots, by the world's own count.
        fetching = Counter(
            client.plan.decode
            for client in self.clients.values()
            if client.plan is not None and client.fetching_since_s is not None and not client.outcome
        )
        assert max(fetching.values(), default=0) <= self.settings.slots_max

    def _carry_out(self, start: Start) -> None:
        client, plan = self.clients[start.stream], start.plan
        assert not client.outcome, "a stream that is over was started"
        assert start.attempt == client.attempt + 1
        # Nobody who runs is moved: only victims, and who has held a slot for too long.
        since_s, lease_s = client.fetching_since_s, self.settings.slot_lease_s
        assert client.broken or (since_s is not None and self.now_s >= since_s + lease_s - SLACK_S), "a running stream was moved"
        self._check_plan(client, plan)
        client.attempt, client.plan, client.broken = start.attempt, plan, False
        client.fetching_since_s = self.now_s if plan.runs else None
        client.one_call = plan.prefill is not None and plan.prefill == self._own_prefill(plan.decode)
        # A prompt that came as text is sent to prefill first, wherever that is: its ids are what the proxy needs.
        client.at_prefill = plan.prefill is not None or not client.knows_prompt
        self.soon(("advance", (start.stream, start.attempt)))

    def _check_plan(self, client: Client, plan: Plan) -> None:
        named = {plan.decode, plan.prefill, *(run.holder for run in plan.runs), *(place.holder for place in plan.places)} - {None}
        assert named <= self.up, f"{named - self.up} are not up"
        assert plan.prefill is None or not plan.runs
        assert self.engines in (Engines.OURS, Engines.SERVERS) or not plan.runs, "nobody fetches"
        own = self._own_prefill(plan.decode)
        if self.engines is Engines.SHARDED and own is not None:
            assert plan.prefill in (None, own), "nobody takes another server's hand-off"
            assert own in self.up, "nobody computes at half a server"
        for before, after in pairwise(plan.runs):
            assert before.first_page + before.pages == after.first_page, "runs follow each other"
        for run in plan.runs:
            self._check_run(client, plan, run)
        self._check_places(client, plan)

    def _check_run(self, client: Client, plan: Plan, run: Run) -> None:
        assert run.holder != plan.decode, "nobody fetches from himself"
        assert run.generation == self.epochs[run.holder]
        assert 0 <= run.first_page < run.first_page + run.pages <= (client.history_tokens - 1) // PAGE
        epoch, pages = client.held[run.holder] if run.holder in client.held else client.told[run.holder]
        assert epoch == run.generation, "what a former life held is lost"
        assert run.first_page <= pages, "it is known to have nothing of the run"
        if run.holder in client.held:
            assert run.first_page + run.pages <= pages

    def _check_places(self, client: Client, plan: Plan) -> None:
        serving = self.nodes[plan.decode]
        at_home = [self.nodes[place.holder] == serving for place in plan.places]
        allowed: dict[BackupMode, list[list[bool]]] = {
            BackupMode.OFF: [[]],
            BackupMode.LOCAL: [[], [True]],
            BackupMode.REMOTE: [[], [False]],
        }
        assert at_home in allowed.get(self.backup.mode, [[], [True], [False], [True, False]])
        for place in plan.places:
            assert isinstance(place, Place)
            assert place.reserved_bytes >= client.history_tokens // PAGE * GEOMETRY.page_bytes or not client.knows_prompt

    def _advance(self, whom: object) -> None:
        """The attempt gets on by a stage, or breaks, or hangs until somebody notices."""
        assert isinstance(whom, tuple)
        stream, attempt = whom
        client = self.clients[stream]
        if client.attempt != attempt or client.broken or client.runs_on is None or client.runs_on not in self.up:
            return
        if not client.at_prefill and client.plan is not None and self._denies(client, client.plan):
            client.broken, client.fetching_since_s = True, None
            self.denials += 1
            self.tell(SlotDenied(stream, attempt, client.plan.decode, self.random.choice([0.0, 0.05, 0.4, 3.0])))
            self.tell(SlotDenied(stream, attempt, client.plan.decode, 1.0))  # Said twice, or too late.
        elif self.random.random() < self.failure_rate:
            self.at(self.now_s + self.random.choice([0.0, 5.0]), ("break", whom))
        elif client.at_prefill:
            client.held[client.runs_on] = self.epochs[client.runs_on], client.history_tokens // PAGE
            self._store(stream, client)
            client.at_prefill, client.knows_prompt = False, True
            assert client.plan is not None
            client.broken = client.plan.decode not in self.up  # Nobody is there to hand it off to.
            self.tell(PrefillDone(stream, attempt, client.history_tokens))
            self.soon(("advance", whom))
        elif self.random.random() < 0.4:
            client.outcome = "complete"
            client.fetching_since_s = None
            self.tell(StreamEnded(stream, attempt))
        else:
            client.produced_tokens += self.random.randint(1, 40)
            client.fetching_since_s = None
            # What is reserved elsewhere is released now.
            kept = {place.holder for place in client.plan.places} if client.plan else set()
            client.stored = {agent: stored for agent, stored in client.stored.items() if agent in kept}
            client.told = {agent: told for agent, told in client.told.items() if agent in kept}
            self.tell(StreamResumed(stream, attempt))
            self._store(stream, client)
            self.soon(("advance", whom))

    def _denies(self, client: Client, plan: Plan) -> bool:
        """Other proxies have the slots: said before anything is fetched, so before any token."""
        return client.fetching_since_s is not None and bool(plan.runs) and self.random.random() < self.failure_rate

    def _store(self, stream: StreamId, client: Client) -> None:
        """The instance has sent pages to the agents of its plan; sometimes the agents say so."""
        assert client.plan is not None
        for place in client.plan.places:
            agent = place.holder
            if agent not in self.up:
                continue
            epoch, pages = client.stored.get(agent, (0, 0))
            if epoch != self.epochs[agent]:
                pages = 0
            client.stored[agent] = self.epochs[agent], self.random.randint(pages, client.history_tokens // PAGE)
            if self.random.random() < 0.8:
                self.soon(("report", agent))

    def _report(self, agent: object) -> None:
        """Everything it has, also of streams that are over or have been moved elsewhere."""
        agent = InstanceId(str(agent))
        epoch = self.epochs[agent]
        found = {
            name: client.stored[agent][1] for name, client in self.clients.items() if client.stored.get(agent, (0, 0))[0] == epoch
        }
        for name, pages in found.items():
            self.clients[name].told[agent] = epoch, pages
        if agent in self.up:
            reserved = self.random.randint(0, 1 << 20)
            self.tell(CheckpointsReported(agent, epoch, reserved, len(found), found))
        self.tell(CheckpointsReported(agent, epoch - 1, 0, 0, dict.fromkeys(found, 1000)))

    def _break(self, whom: object, *, abrupt: bool = False) -> None:
        assert isinstance(whom, tuple)
        stream, attempt = whom
        client = self.clients[stream]
        if client.attempt == attempt and client.runs_on is not None and not client.broken:
            client.broken, client.fetching_since_s = True, None
            assert client.plan is not None
            whose = client.plan.decode if client.one_call else client.runs_on
            self.tell(AttemptFailed(stream, attempt, whose, "broke", client.produced_tokens, abrupt))

    def _judge(self, what: object) -> None:
        assert isinstance(what, tuple)
        name, state = what
        running = {stream: client for stream, client in self.clients.items() if client.is_lost_with(name) and not client.broken}
        self.tell(GpuJudged(name, state, "xid 79", {stream: client.produced_tokens for stream, client in running.items()}))

    def _drain(self, name: object) -> None:
        """It says that it is about to end; later it does, with whatever is still there. Until then it has what it had."""
        name = InstanceId(str(name))
        if name not in self.up or name in self.leaving or name.startswith("agent"):
            return
        self.leaving.add(name)
        self.at(self.now_s + self.random.uniform(0.0, 4.0), ("kill", name))
        self.tell(DrainReported(name, self.epochs[name] - 1, {}))  # Of a former life.
        self._drain_on(name)

    def _drain_on(self, name: object) -> None:
        name = InstanceId(str(name))
        if name not in self.leaving:
            return
        self.soon(("drain_on", name))
        running = {stream: client for stream, client in self.clients.items() if client.is_lost_with(name) and not client.broken}
        for client in running.values():
            if not client.at_prefill:
                client.held[name] = self.epochs[name], (client.history_tokens - 1) // PAGE
        self.tell(DrainReported(name, self.epochs[name], {stream: client.produced_tokens for stream, client in running.items()}))

    def _kill_node(self, node: object) -> None:
        for name in sorted(self.epochs):
            if self.nodes[name] == node:
                self._kill(name)

    def _kill(self, name: object) -> None:
        name = InstanceId(str(name))
        if name not in self.up:
            return
        self.leaving.discard(name)
        self.at(self.now_s + self.random.uniform(0.1, 4.0), ("up", name))
        if name.startswith("agent"):
            self.up.discard(name)
            self.tell(HolderLost(name, self.epochs[name], "killed"))
            self.tell(HolderLost(name, self.epochs[name] - 1, "old news"))
            return
        victims = [stream for stream, client in self.clients.items() if client.is_lost_with(name)]
        # Connections may break a moment before the instance is known to be lost, and once more after it.
        early = [stream for stream in victims if self.random.random() < 0.3]
        for stream in early:
            self._break((stream, self.clients[stream].attempt), abrupt=True)
        self.up.discard(name)
        victims = [stream for stream, client in self.clients.items() if client.is_lost_with(name)]
        old_attempts = [(stream, self.clients[stream].attempt) for stream in victims]
        for stream in victims:
            self.clients[stream].broken, self.clients[stream].fetching_since_s = True, None
        produced = {stream: self.clients[stream].produced_tokens for stream in victims}
        self.tell(InstanceLost(name, self.epochs[name], "killed", produced))
        for stream, attempt in old_attempts:
            self.tell(AttemptFailed(stream, attempt, name, "reset", produced[stream]))
        self.tell(InstanceLost(name, self.epochs[name] - 1, "old news", {}))

    def _own_prefill(self, name: InstanceId) -> InstanceId | None:
        own = InstanceId("p" + name[1:])
        return own if self.engines.are_servers and name[0] == "d" and own in self.epochs else None

    def _up(self, name: object) -> None:
        name = InstanceId(str(name))
        if name in self.up:
            return
        self.up.add(name)
        self.epochs[name] += 1
        if name.startswith("agent"):
            capacity = self.random.choice([1 << 16, 1 << 22, 1 << 30])
            self.tell(HolderUp(name, self.nodes[name], self.epochs[name], capacity, 10 ** self.random.uniform(5, 10)))
            return
        can, own = _CAPABILITIES[self.engines], self._own_prefill(name)
        self.tell(InstanceUp(instance(name, self.epochs[name], capabilities=can, own_prefill=own)))
        self.tell(LoadReported(name, self.random.choice([0.0, 0.3])))
        nodes = self.random.choices(sorted(set(self.nodes.values())), k=2)
        self.tell(LinkMeasured(nodes[0], nodes[1], 10 ** self.random.uniform(4, 9)))

    def _arrive(self, stream: object) -> None:
        stream = StreamId(str(stream))
        client = self.clients[stream] = Client(prompt_tokens=self.random.randint(1, 500))
        if self.random.random() < 0.25:
            self._adopt(stream, client)
            return
        guess = 1 if self.random.random() < 0.5 else client.prompt_tokens
        client.knows_prompt = guess > 1 and self.random.random() < 0.5
        deadlines = Deadlines(*(self.random.choice([None, None, 0.1, 5.0]) for _ in range(3)))
        self.tell(StreamArrived(stream, guess, self.random.choice([None, guess + 300]), deadlines))
        if self.random.random() < 0.1:
            self.soon(("forget_pages", stream))

    def _adopt(self, stream: StreamId, client: Client) -> None:
        """It comes from another proxy, which knew of some of its pages, as they are or as they were in a former life."""
        client.produced_tokens, client.knows_prompt = self.random.choice([0, self.random.randint(1, 200)]), True
        kept = [Kept(InstanceId("x9"), 1, 1)]
        for name in self.random.sample(sorted(self.epochs), k=min(3, len(self.epochs))):
            epoch, pages = self.epochs[name], self.random.randint(0, client.history_tokens // PAGE)
            if name.startswith("agent"):
                client.stored[name] = client.told[name] = epoch, pages
            else:
                client.held[name] = epoch, pages
            kept.append(Kept(name, epoch, pages))
            if self.random.random() < 0.3:
                kept.append(Kept(name, epoch - 1, client.history_tokens // PAGE))
        self.random.shuffle(kept)
        most_tokens = self.random.choice([None, client.history_tokens + 300])
        deadlines = Deadlines(*(self.random.choice([None, None, 0.1, 5.0]) for _ in range(3)))
        adopted = StreamAdopted(
            stream,
            client.prompt_tokens,
            client.produced_tokens,
            most_tokens,
            deadlines,
            self.random.choice([0.0, 0.05, 4.0]),
            tuple(kept),
        )
        self.tell(adopted)
        if not client.outcome and self.random.random() < 0.2:
            self.tell(adopted)  # Said twice.
        if self.random.random() < 0.1:
            self.soon(("forget_pages", stream))

    def _forget_pages(self, stream: object) -> None:
        client = self.clients[StreamId(str(stream))]
        for holder in [*client.held, *client.stored]:
            client.held.pop(holder, None)
            client.stored.pop(holder, None)
            client.told.pop(holder, None)
            self.tell(RetentionLost(holder, (StreamId(str(stream)),)))

    def _end_late(self, stream: object) -> None:
        self.tell(StreamEnded(StreamId(str(stream)), self.clients[StreamId(str(stream))].attempt))

    def _wake(self, timer: object) -> None:
        if timer == self._timer or not self.one_timer:
            self.tell(TimerFired())
