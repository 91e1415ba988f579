"""A policy whose driver keeps the event log, and incidents recorded by it: a scripted one, and
random ones.
"""

import sys
from collections import Counter
from random import Random

from kvrs.config.backup import BackupMode, BackupSettings, Placement
from kvrs.config.policy import Dispatch, Handoff, PolicyName, PolicySettings, SloSettings
from kvrs.core.event_log import event_line, header_line
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.protocol.instance import GpuState, ModelNames, ReformingReport
from kvrs.protocol.rows import NO_ROWS, CopyReport, RegionReport, RowsReport
from tests.core.policy_harness import instance_up, load

POLICY, SLO, BACKUP = PolicySettings(), SloSettings(), BackupSettings(mode=BackupMode.REMOTE)
A, B = StreamId("A"), StreamId("B")
SPACE = "0123456789abcdef"


class Recorder:
    """A policy whose driver keeps the log."""

    def __init__(
        self,
        policy: PolicySettings = POLICY,
        slo: SloSettings = SLO,
        backup: BackupSettings = BACKUP,
    ) -> None:
        self.policy = RecoveryPolicy(policy, slo, backup)
        self.lines = [header_line(policy, slo, backup)]
        self.now_s = 0.1

    def handle(self, event: ev.Event, after_s: float = 0.1) -> list[act.Action]:
        self.now_s += after_s
        actions = self.policy.handle(event, self.now_s)
        self.lines.append(event_line(self.now_s, event, actions))
        return actions


def incident() -> list[str]:
    """Two streams decode on n0, whose decode instance dies; one has a checkpoint on n1, where both
    come back.
    """
    recorder = Recorder()
    table = catalog.prefill_table("opt-13b-a100-kvrs-seed")
    for name in ("p0", "d0", "p1"):
        recorder.handle(instance_up(name, prefill=table))
    for node in ("n0", "n1"):
        recorder.handle(ev.HolderUp(InstanceId(f"agent-{node}"), NodeId(node), 1, 1 << 28, 26e9))
    recorder.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 1e9 / 3))
    recorder.handle(load("p1", 9.0))
    for stream in (A, B):
        recorder.handle(
            ev.StreamArrived(
                stream, 1000, most_tokens=1200, deadlines=ev.Deadlines(recovery_gap_s=5.0)
            )
        )
        recorder.handle(ev.PrefillDone(stream, 1, 1000))
        recorder.handle(ev.StreamResumed(stream, 1))
    recorder.handle(ev.CheckpointsReported(InstanceId("agent-n1"), 1, 1 << 22, 2, {A: 62}))
    recorder.handle(instance_up("d1", prefill=table))
    recorder.handle(ev.InstanceLost(InstanceId("d0"), 1, "killed", {A: 7, B: 1}))
    for _ in range(2):
        recorder.handle(ev.TimerFired())
    for stream in (A, B):
        recorder.handle(ev.StreamResumed(stream, 2))
    recorder.handle(ev.AttemptFailed(A, 2, InstanceId("d1"), "reset [by peer]", 9))
    recorder.handle(ev.InstanceLost(InstanceId("p1"), 1, "gone", {}))
    recorder.handle(ev.HolderLost(InstanceId("agent-n1"), 1, "gone"))
    for stream in (A, B):
        recorder.handle(ev.StreamEnded(stream, 2))
    return recorder.lines


NAMES = ("tiny", "lora")


class Rough:
    """Four nodes on which everything comes and goes, so that most events and actions occur."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.exits, self.loads = Random(seed), Random(seed)
        self.has_tiers = seed % 2 > 0
        self.slots_max = self.random.choice([1, 32])
        self.recorder = Recorder(
            self._settings(),
            SloSettings(abort=seed % 3 == 0, recovery_gap_s=2.0),
            BackupSettings(
                mode=BackupMode.REMOTE if seed % 2 else self.random.choice(list(BackupMode)),
                placement=self.random.choice(list(Placement)),
            ),
        )
        self.epochs: Counter[InstanceId] = Counter()
        self.up: set[InstanceId] = set()
        self.started: dict[StreamId, act.Start] = {}
        self.names = [
            InstanceId(f"{kind}{node}") for node in range(4) for kind in ("p", "d", "agent-n")
        ]

    def _settings(self) -> PolicySettings:
        return PolicySettings(
            name=self.random.choice(list(PolicyName)),
            dispatch=self.random.choice(list(Dispatch)),
            handoff=self.random.choice(list(Handoff)),
            slots_max=self.slots_max,
        )

    def run(self, steps: int) -> list[str]:
        for name in self.names:
            self.rise(name)
        for number in range(steps):
            self.step(StreamId(f"s{number}"))
            if self.has_tiers and number % 20 == 0:
                self.restore(StreamId(f"r{number}"))
        return self.recorder.lines

    def step(self, fresh: StreamId) -> None:
        stream = self.random.choice(sorted(self.started)) if self.started else fresh
        attempt = self.started[stream].attempt if self.started else 1
        name, node = self.random.choice(self.names), NodeId(f"n{self.random.randrange(4)}")
        drawn = self.random.random()
        if self.random.random() < 0.02:
            self.eject(fresh)
        elif drawn < 0.02:
            kept = (ev.Kept(name, self.epochs[name], self.random.randint(0, 40)),)
            self.handle(
                ev.StreamAdopted(
                    fresh,
                    self.random.randint(50, 900),
                    self.random.randint(0, 90),
                    age_s=1.5,
                    kept=kept,
                )
            )
        elif drawn < 0.3:
            self.handle(
                ev.StreamArrived(
                    fresh,
                    self.random.randint(50, 900),
                    deadlines=ev.Deadlines(self.random.choice([None, 0.5])),
                    name="lora" if fresh.endswith("7") else "",
                )
            )
        elif drawn < 0.5:
            self.handle(ev.PrefillDone(stream, attempt, self.random.randint(50, 900)))
        elif drawn < 0.7:
            self.handle((ev.WholeAsked if drawn < 0.52 else ev.StreamResumed)(stream, attempt))
        elif drawn < 0.715:
            self.handle(ev.StreamEnded(stream, attempt))
        elif drawn < 0.72:
            self.handle(ev.SettingsReloaded(self._settings(), SloSettings(recovery_gap_s=2.0)))
        elif drawn < 0.73 and stream in self.started:
            self.handle(
                ev.SlotDenied(
                    stream, attempt, self.started[stream].plan.decode, self.random.random()
                )
            )
        elif drawn < 0.75:
            self.handle(ev.RetentionLost(name, (stream,)))
            self.handle(ev.AttemptFailed(stream, attempt, name, "reset", 5))
        elif drawn < 0.8:
            self.handle(
                ev.LinkMeasured(node, NodeId(f"n{name[-1]}"), self.random.uniform(1e6, 1e10))
            )
        elif drawn < 0.88 and not name.startswith("agent"):
            self.handle(self.load(name, int(drawn * 1e6), self.random.random(), stream))
        elif drawn < 0.9 and name.startswith("agent"):
            self.handle(
                ev.CheckpointsReported(
                    name,
                    self.epochs[name],
                    1 << 20,
                    3,
                    {s: self.random.randint(0, 60) for s in self.started},
                    self.rows(int(name[-1])),
                )
            )
        elif drawn < 0.915 and not name.startswith("agent"):
            self.handle(
                ev.GpuJudged(name, self.random.choice(list(GpuState)), "xid 79", {stream: 3})
            )
        elif drawn < 0.94 and not name.startswith("agent"):
            self.handle(self.said(name, int(drawn * 1e6), stream))
        elif drawn < 0.95:
            self.handle(ev.TimerFired())
        elif name in self.up:
            self.fall(name)
        else:
            self.rise(name)

    def rows(self, node: int) -> RowsReport:
        """The rows of an agent: of its node's decode instance, and copies of the node before."""
        if not self.has_tiers or self.loads.random() < 0.1:
            return NO_ROWS
        own = RegionReport(InstanceId(f"d{node}"), SPACE, self.loads.random() < 0.9, 100, 1 << 16)
        copied = CopyReport(NodeId(f"n{(node - 1) % 4}"), SPACE, self.loads.randint(0, 10) / 10)
        return RowsReport((own,), self.loads.random() < 0.9, (copied,))

    def load(self, name: InstanceId, drawn: int, seconds: float, stream: StreamId) -> ev.Event:
        """An event of an instance's load, names or re-forming."""
        if drawn >= 850_000:
            return self.re_formed(name, drawn, stream)
        if drawn < 803_000:
            return ev.TransferHung(name, self.epochs[name])
        if drawn < 812_000:
            return ev.NamesListed(name, self.epochs[name], ModelNames(NAMES[: drawn % 3]))
        return load(name, seconds, epoch=self.epochs[name])

    def said(self, name: InstanceId, drawn: int, stream: StreamId) -> ev.Event:
        """An event of an instance's drain or self-test."""
        kind, number = drawn % 4, drawn // 4
        if kind == 0:
            return load(name, epoch=self.epochs[name], draining=True, produced_tokens={stream: 3})
        if kind == 1:
            return ev.DrainOrdered(name, number % 2 > 0, {stream: 3})
        if kind == 2:
            return ev.DrainEnded(name)
        return ev.SelfTested(name, self.epochs[name], number % 8 > 0, ("", "1", "2")[number % 3])

    def re_formed(self, name: InstanceId, drawn: int, stream: StreamId) -> ev.Event:
        """An instance has lost ranks, predicts otherwise, or goes on."""
        epoch, factor = self.epochs[name], 1 + (drawn % 3) / 2
        report = ReformingReport(
            number=drawn % 2,
            way="reshard",
            ready_in_s=0.01 * (drawn % 7),
            degree=1,
            lost=[1],
            move_bytes=0,
            missing_pages={stream: drawn % 5},
            page_s=0.001,
            decode_factor=factor,
            prefill_factor=factor,
        )
        return load(
            name,
            epoch=epoch,
            reforming=report if drawn % 3 else None,
            degree=1 + drawn % 2,
            full_degree=2,
            token_s=0.02,
            produced_tokens={stream: 3},
        )

    def eject(self, fresh: StreamId) -> None:
        """An instance fails every request until it is ejected, and answers its probe."""
        for number in range(6):
            stream = StreamId(f"{fresh}-{number}")
            self.handle(ev.StreamArrived(stream, 100))
            if (start := self.started.get(stream)) is not None:
                failing = start.plan.prefill or start.plan.decode
                self.handle(ev.AttemptFailed(stream, start.attempt, failing, "HTTP 500", 0))
        self.recorder.now_s += 1.5
        for number in range(6, 12):
            stream = StreamId(f"{fresh}-{number}")
            self.handle(ev.StreamArrived(stream, 100))
            self.handle(ev.PrefillDone(stream, 1, 100))
            self.handle(ev.StreamResumed(stream, 1))

    def restore(self, fresh: StreamId) -> None:
        """An agent reports rows of the node on which a stream decodes, whose instances die."""
        self.handle(ev.SettingsReloaded(PolicySettings(name=PolicyName.ALWAYS_RESTORE), SLO))
        self.handle(ev.StreamArrived(fresh, 600))
        if (start := self.started.get(fresh)) is None:
            return
        self.handle(ev.PrefillDone(fresh, 1, 600))
        self.handle(ev.StreamResumed(fresh, 1))
        decode, prefill = start.plan.decode, start.plan.prefill
        agent = InstanceId(f"agent-n{decode[-1]}")
        if prefill is not None and {decode, prefill, agent} <= self.up:
            rows = self.rows(int(decode[-1]))
            self.handle(ev.CheckpointsReported(agent, self.epochs[agent], 0, 0, {}, rows))
            self.fall(decode)
            self.fall(prefill)
            self.recorder.now_s += 0.5
            self.handle(ev.TimerFired())
            if fresh in self.started:
                self.handle(ev.StreamResumed(fresh, self.started[fresh].attempt))

    def rise(self, name: InstanceId) -> None:
        self.up.add(name)
        self.epochs[name] += 1
        if name.startswith("agent"):
            self.handle(ev.HolderUp(name, NodeId(f"n{name[-1]}"), self.epochs[name], 1 << 26, 26e9))
            if (rows := self.rows(int(name[-1]))) != NO_ROWS:
                self.handle(ev.CheckpointsReported(name, self.epochs[name], 0, 0, {}, rows))
        else:
            if self.started and self.random.random() < 0.5:
                stream = self.random.choice(sorted(self.started))
                self.handle(ev.PagesKept(name, self.epochs[name], {stream: 3}))
            names = NAMES if name[1] in "012" else NAMES[:1]
            self.handle(instance_up(name, self.epochs[name], names=names))

    def fall(self, name: InstanceId) -> None:
        self.up.discard(name)
        if name.startswith("agent"):
            self.handle(ev.HolderLost(name, self.epochs[name], "killed"))
        elif self.random.random() < 0.2:
            self.handle(ev.InstanceRemoved(name, dict.fromkeys(self.started, 3)))
        else:
            self.handle(
                ev.InstanceLost(
                    name,
                    self.epochs[name],
                    "killed",
                    {stream: self.random.randint(0, 50) for stream in self.started},
                )
            )
            if self.exits.random() < 0.5:
                is_external = self.exits.random() < 0.5
                self.handle(ev.InstanceExited(name, self.epochs[name], "signal 9", is_external))

    def handle(self, event: ev.Event) -> None:
        for action in self.recorder.handle(event, self.random.uniform(0, 0.02)):
            if isinstance(action, act.Start):
                self.started[action.stream] = action
            elif isinstance(action, act.GiveUp):
                self.started.pop(action.stream, None)
        start = self.started.get(event.stream) if isinstance(event, ev.StreamResumed) else None
        if start is not None and start.plan.asked:
            tokens = self.loads.choice([0, 600])
            self.handle(ev.RowsCounted(start.stream, start.attempt, tokens))


if __name__ == "__main__":
    print("\n".join(Rough(int(sys.argv[1])).run(int(sys.argv[2]))))
