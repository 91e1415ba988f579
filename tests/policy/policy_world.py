"""A small world in virtual time that carries out what the policy asks for, breaks things, and watches the laws.

It knows what is really up, who really holds which pages and which transfers really run, so it can tell when the
policy asks for something that it must not.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Action, GiveUp, Plan, Recovered, Start, WakeAt
from kvrs.policy.config import PolicySettings, SloSettings
from kvrs.policy.costs import Option
from kvrs.policy.events import (
    AttemptFailed,
    Event,
    InstanceLost,
    InstanceUp,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    RetentionLost,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.recovery import RecoveryPolicy
from tests.policy.policy_stories import GEOMETRY, instance


@dataclass(slots=True)
class Client:
    """One stream as the world sees it."""

    prompt_tokens: int
    produced_tokens: int = 0
    attempt: int = 0
    plan: Plan | None = None
    at_prefill: bool = False
    migrating: bool = False
    outcome: str = ""
    held: dict[InstanceId, tuple[int, int]] = field(default_factory=dict)  # Epoch, pages.

    @property
    def runs_on(self) -> InstanceId | None:
        if self.plan is None or self.outcome:
            return None
        return self.plan.prefill if self.at_prefill else self.plan.decode


class World:
    def __init__(
        self, seed: int, names: list[str], settings: PolicySettings, slo: SloSettings, failure_rate: float, one_timer: bool
    ) -> None:
        self.policy = RecoveryPolicy(settings, slo)
        self.settings = settings
        self.random = Random(seed)
        self.failure_rate = failure_rate
        self.one_timer = one_timer  # A driver may keep only the latest timer, or all of them.
        self.now_s = 0.0
        self.epochs: dict[InstanceId, int] = {InstanceId(name): 0 for name in names}
        self.up: set[InstanceId] = set()
        self.clients: dict[StreamId, Client] = {}
        self.log: list[tuple[Event, float]] = []
        self.answers: list[list[Action]] = []
        self._agenda: list[tuple[float, int, tuple[str, object]]] = []
        self._order = count()
        self._timer = 0

    def run(self, streams: int, kills: int) -> None:
        for name in self.epochs:
            self.at(self.random.uniform(0.0, 0.2), ("up", name))
        for n in range(streams):
            self.at(self.random.uniform(0.0, 3.0), ("arrive", StreamId(f"s{n}")))
        for _ in range(kills):
            self.at(self.random.uniform(0.5, 6.0), ("kill", self.random.choice(sorted(self.epochs))))
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
                case Recovered():
                    client = self.clients[action.stream]
                    assert client.attempt == action.attempt
                    client.migrating = action.option is Option.MIGRATE
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
        for target in self.epochs:
            transfers = [c for c in self.clients.values() if c.migrating and not c.outcome and c.plan and c.plan.decode == target]
            assert len(transfers) <= self.settings.slots_max

    def _carry_out(self, start: Start) -> None:
        client, plan = self.clients[start.stream], start.plan
        assert not client.outcome, "a stream that is over was started"
        assert start.attempt == client.attempt + 1
        named = {plan.decode, plan.prefill, plan.source} - {None}
        assert named <= self.up, f"{named - self.up} are not up"
        if plan.source is not None:
            epoch, pages = client.held[plan.source]
            assert epoch == self.epochs[plan.source] == plan.source_generation
            history = client.prompt_tokens + client.produced_tokens
            assert 0 < plan.source_pages <= min(pages, (history - 1) // GEOMETRY.page_size_tokens)
        client.attempt, client.plan, client.migrating = start.attempt, plan, False
        client.at_prefill = plan.prefill is not None
        self.soon(("advance", (start.stream, start.attempt)))

    def _advance(self, whom: object) -> None:
        """The attempt gets on by a stage, or breaks, or hangs until somebody notices."""
        assert isinstance(whom, tuple)
        stream, attempt = whom
        client = self.clients[stream]
        if client.attempt != attempt or client.runs_on is None or client.runs_on not in self.up:
            return
        if self.random.random() < self.failure_rate:
            self.at(self.now_s + self.random.choice([0.0, 5.0]), ("break", whom))
        elif client.at_prefill:
            history = client.prompt_tokens + client.produced_tokens
            client.held[client.runs_on] = self.epochs[client.runs_on], history // GEOMETRY.page_size_tokens
            client.at_prefill = False
            self.tell(PrefillDone(stream, attempt, history))
            self.soon(("advance", whom))
        elif self.random.random() < 0.4:
            client.outcome = "complete"
            client.migrating = False
            self.tell(StreamEnded(stream, attempt))
        else:
            client.produced_tokens += self.random.randint(1, 40)
            client.migrating = False
            self.tell(StreamResumed(stream, attempt))
            self.soon(("advance", whom))

    def _break(self, whom: object) -> None:
        assert isinstance(whom, tuple)
        stream, attempt = whom
        client = self.clients[stream]
        if client.attempt == attempt and client.runs_on is not None:
            client.migrating = False
            self.tell(AttemptFailed(stream, attempt, client.runs_on, "broke", client.produced_tokens))

    def _kill(self, name: object) -> None:
        name = InstanceId(str(name))
        if name not in self.up:
            return
        victims = [stream for stream, client in self.clients.items() if client.runs_on == name]
        # Connections may break a moment before the instance is known to be lost, and once more after it.
        early = [stream for stream in victims if self.random.random() < 0.3]
        for stream in early:
            self._break((stream, self.clients[stream].attempt))
        self.up.discard(name)
        victims = [stream for stream, client in self.clients.items() if client.runs_on == name]
        old_attempts = [(stream, self.clients[stream].attempt) for stream in victims]
        for stream in victims:
            self.clients[stream].migrating = False
        produced = {stream: self.clients[stream].produced_tokens for stream in victims}
        self.tell(InstanceLost(name, self.epochs[name], "killed", produced))
        for stream, attempt in old_attempts:
            self.tell(AttemptFailed(stream, attempt, name, "reset", produced[stream]))
        self.tell(InstanceLost(name, self.epochs[name] - 1, "old news", {}))
        self.at(self.now_s + self.random.uniform(0.1, 4.0), ("up", name))

    def _up(self, name: object) -> None:
        name = InstanceId(str(name))
        if name not in self.up:
            self.up.add(name)
            self.epochs[name] += 1
            self.tell(InstanceUp(instance(name, self.epochs[name])))
            self.tell(LoadReported(name, self.random.choice([0.0, 0.3])))
            nodes = [NodeId("n" + self.random.choice(sorted(self.epochs))[1]) for _ in range(2)]
            self.tell(LinkMeasured(nodes[0], nodes[1], 10 ** self.random.uniform(4, 9)))

    def _arrive(self, stream: object) -> None:
        stream = StreamId(str(stream))
        self.clients[stream] = Client(prompt_tokens=self.random.randint(1, 500))
        self.tell(StreamArrived(stream, 1 if self.random.random() < 0.5 else self.clients[stream].prompt_tokens))
        if self.random.random() < 0.1:
            self.soon(("forget_pages", stream))

    def _forget_pages(self, stream: object) -> None:
        client = self.clients[StreamId(str(stream))]
        for holder in list(client.held):
            del client.held[holder]
            self.tell(RetentionLost(holder, (StreamId(str(stream)),)))

    def _end_late(self, stream: object) -> None:
        self.tell(StreamEnded(StreamId(str(stream)), self.clients[StreamId(str(stream))].attempt))

    def _wake(self, timer: object) -> None:
        if timer == self._timer or not self.one_timer:
            self.tell(TimerFired())
