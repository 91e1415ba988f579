"""A router of your own around the decisions of kvrs, in one file.

    python examples/router.py [--policy auto]

One prefill engine and two decode engines answer four streams; a decode engine dies under its
streams, and `RecoveryPolicy` says where and how each goes on. The router has no server, file or
setting of kvrs: it tells the policy what has happened (events of `kvrs.core.model.events`), and
performs what the policy returns (actions of `kvrs.core.model.actions`). A router with sockets does
the same with its own calls and clock.

The engines are stand-ins in virtual time: their next token is a hash of all tokens before it, so a
stream that goes on from another history than its client has ends with other tokens.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from kvrs.config.policy import PolicyName, PolicySettings, SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, MeasuredPrefill, Role

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 600, 40
KILLED, KILLED_AT_TOKENS = InstanceId("d0"), 20
STEP_S = 0.02  # One token of every stream.
# A model of 7 B parameters on a small GPU: 0.3 ms per token of a prompt, and the shape of its KV.
PREFILL = MeasuredPrefill("stand-in", 1000, [0.01, 0.3])
GEOMETRY = KvGeometry(layers=32, kv_heads=8, head_dim=128, dtype_bytes=2, page_size_tokens=16)
LINK_BYTES_PER_S = 1.25e9  # 10 Gbit/s.


@dataclass
class Engine:
    """A stand-in for a server of an engine."""

    info: InstanceInfo
    is_alive: bool = True

    def next_token(self, history: Sequence[int]) -> int:
        if not self.is_alive:
            raise ConnectionResetError(f"{self.info.id} is gone")
        return crc32(bytes(token % 251 for token in history)) % 50_000


@dataclass
class Client:
    """A stream: the tokens that its client has, and the attempt that produces the next ones."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    attempt: act.Start | None = None
    is_resumed: bool = False  # The attempt has produced a token.


class Router:
    """Tells the policy what happens, and does what it says."""

    def __init__(self, policy: PolicyName, engines: Sequence[Engine]) -> None:
        self.policy = RecoveryPolicy(PolicySettings(name=policy), SloSettings())
        self.engines = {engine.info.id: engine for engine in engines}
        self.clients: dict[StreamId, Client] = {}
        self.now_s, self.wake_s = 0.0, float("inf")
        for engine in engines:
            self.tell(ev.InstanceUp(engine.info))
        nodes = {engine.info.node for engine in engines}
        for source in nodes:
            for target in nodes - {source}:
                self.tell(ev.LinkMeasured(source, target, LINK_BYTES_PER_S, LINK_BYTES_PER_S))

    def tell(self, event: ev.Event) -> None:
        for action in self.policy.handle(event, self.now_s):
            self.perform(action)

    def perform(self, action: act.Action) -> None:
        match action:
            case act.Start(stream=stream):
                client = self.clients[stream]
                client.attempt, client.is_resumed = action, False
            case act.Redirect(stream=stream, plan=plan):
                client = self.clients[stream]
                assert client.attempt is not None
                client.attempt = act.Start(stream, action.attempt, plan)
            case act.Halt(stream=stream):
                self.clients[stream].attempt = None
            case act.Recovered():
                costs = ", ".join(
                    f"{each.option.value} at {each.target} {each.total_s * 1e3:.0f} ms"
                    for each in action.estimates
                )
                print(f"{action.stream}: {action.option.value}; weighed: {costs}")
            case act.GiveUp(stream=stream):
                print(f"{stream}: given up: {action.message}")
                self.clients[stream].attempt = None
            case act.WakeAt(at_s=at_s):
                self.wake_s = at_s
            case _:  # Records for people.
                pass

    def open(self, stream: StreamId, prompt: list[int]) -> None:
        self.clients[stream] = Client(prompt)
        self.tell(ev.StreamArrived(stream, len(prompt), len(prompt) + OUTPUT_TOKENS))

    def step(self) -> None:
        """One token of each stream that has an attempt."""
        self.now_s += STEP_S
        if self.now_s >= self.wake_s:
            self.wake_s = float("inf")
            self.tell(ev.TimerFired())
        for stream, client in self.clients.items():
            if (attempt := client.attempt) is None or len(client.output) == OUTPUT_TOKENS:
                continue
            history = client.prompt + client.output
            if not client.is_resumed and attempt.plan.prefill is not None:
                self.tell(ev.PrefillDone(stream, attempt.attempt, len(history)))
            assert client.attempt is not None  # The policy halts no attempt whose prefill is done.
            engine = self.engines[client.attempt.plan.decode]
            client.output.append(engine.next_token(history))
            if not client.is_resumed:
                client.is_resumed = True
                self.tell(ev.StreamResumed(stream, attempt.attempt))
            if len(client.output) == OUTPUT_TOKENS:
                self.tell(ev.StreamEnded(stream, attempt.attempt))

    def kill(self, instance: InstanceId) -> None:
        """The connections to an engine are reset: tell the policy what each client has."""
        engine = self.engines[instance]
        engine.is_alive = False
        produced: dict[StreamId, int] = {}
        for stream, client in self.clients.items():
            if client.attempt is not None and client.attempt.plan.decode == instance:
                produced[stream], client.attempt = len(client.output), None
        print(f"{instance} dies under {len(produced)} streams")
        self.tell(ev.InstanceLost(instance, engine.info.epoch, "connection reset", produced))


def engine(name: str, node: str, role: Role) -> Engine:
    abilities = [Capability.PULL_PAGES, Capability.RETAIN]
    info = InstanceInfo(
        InstanceId(name), NodeId(node), role, 1, 1, "model", "weights", GEOMETRY, 4096, 0,
        abilities, PREFILL,
    )  # fmt: skip
    return Engine(info)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", type=PolicyName, choices=PolicyName, default=PolicyName.AUTO)
    engines = [
        engine("p0", "a", Role.PREFILL),
        engine("d0", "b", Role.DECODE),
        engine("d1", "c", Role.DECODE),
    ]
    router = Router(parser.parse_args().policy, engines)
    for number in range(STREAMS):
        router.open(StreamId(f"stream {number}"), [*range(number, number + PROMPT_TOKENS)])
    for step in range(2 * OUTPUT_TOKENS):
        if step == KILLED_AT_TOKENS:
            router.kill(KILLED)
        router.step()
    alone, wrong = engine("alone", "x", Role.BOTH), 0
    for client in router.clients.values():
        calm: list[int] = []
        for _ in range(OUTPUT_TOKENS):
            calm.append(alone.next_token(client.prompt + calm))
        wrong += client.output != calm
    print(f"{STREAMS} streams of {OUTPUT_TOKENS} tokens, {wrong} not as without the death")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
