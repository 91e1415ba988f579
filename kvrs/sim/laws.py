"""What must hold of everything that a policy asks for, by what its proxy has been told."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kvrs.agent.config import BackupMode
from kvrs.config import Config
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.actions import Plan, Run, Start
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.policy.timers import SLACK_S
from kvrs.protocol.instance import SlotAsked
from kvrs.sim.process import require
from kvrs.sim.streams import Live


@dataclass(slots=True)
class Told:
    """Who is up and who holds what, as the proxy has told its policy: late, but no guess."""

    up: dict[InstanceId, int] = field(default_factory=dict)  # With the epoch.
    kept: dict[tuple[InstanceId, StreamId], int] = field(default_factory=dict)  # Pages, of instances and agents.

    def lose(self, name: InstanceId) -> None:
        self.up.pop(name, None)
        self.kept = {key: pages for key, pages in self.kept.items() if key[0] != name}


class Laws:
    def __init__(self, config: Config, nodes: Mapping[InstanceId, NodeId]) -> None:
        self._config = config
        self._nodes = nodes
        self._page_size = config.cluster.engine.page_size_tokens
        self._granted: dict[SlotAsked, int] = {}  # By which life of the target's agent.

    def check_start(self, live: Live, start: Start, told: Told, now_s: float) -> None:
        """One writer, and nobody who runs is moved: only victims, and who has held a slot for too long."""
        require(not live.outcome, f"{live.id} is over and was started")
        require(start.attempt == live.attempt + 1, f"attempt {start.attempt} of {live.id} follows attempt {live.attempt}")
        since_s, lease_s = live.fetching_since_s, self._config.policy.slot_lease_s
        has_expired = since_s is not None and now_s >= since_s + lease_s - SLACK_S
        require(live.broken or has_expired, f"{live.id} ran, and was moved")
        self.check_plan(live, start.plan, told)

    def check_plan(self, live: Live, plan: Plan, told: Told) -> None:
        named = {plan.decode, plan.prefill, *(run.holder for run in plan.runs), *(place.holder for place in plan.places)} - {None}
        down = sorted(str(name) for name in named if name not in told.up)
        require(not down, f"the plan for {live.id} names {', '.join(down)}, which is not up")
        require(plan.prefill is None or not plan.runs, f"the plan for {live.id} computes and fetches its whole history")
        for before, after in pairwise(plan.runs):
            require(before.first_page + before.pages == after.first_page, f"the runs for {live.id} do not follow each other")
        for run in plan.runs:
            self._check_run(live, plan, run, told)
        self._check_places(live, plan)

    def _check_run(self, live: Live, plan: Plan, run: Run, told: Told) -> None:
        whose = f"the run of {live.id} from {run.holder}"
        require(run.holder != plan.decode, f"{whose} is fetched by itself")
        require(run.generation == told.up[run.holder], f"{whose} names a former life")
        require(
            run.pages > 0 and run.first_page + run.pages <= (live.history_tokens - 1) // self._page_size, f"{whose} is too long"
        )
        pages = told.kept.get((run.holder, live.id))
        require(pages is not None, f"{whose}: nothing of it is known to be held there")
        assert pages is not None
        is_agent = run.holder.startswith("agent-")
        require(run.first_page <= pages, f"{whose} begins behind the {pages} pages that are held")
        require(is_agent or run.first_page + run.pages <= pages, f"{whose} ends behind the {pages} pages that are held")

    def _check_places(self, live: Live, plan: Plan) -> None:
        serving = self._nodes[plan.decode]
        at_home = sorted(self._nodes[place.holder] == serving for place in plan.places)
        allowed: dict[BackupMode, list[list[bool]]] = {
            BackupMode.OFF: [[]],
            BackupMode.LOCAL: [[], [True]],
            BackupMode.REMOTE: [[], [False]],
            BackupMode.BOTH: [[], [True], [False], [False, True]],
        }
        require(at_home in allowed[self._config.backup.mode], f"checkpoints of {live.id} go to {plan.places}")

    def check_slots(self, streams: Iterable[Live]) -> Counter[InstanceId]:
        """Of one proxy, which may have more than the target's agent has granted: it could not be asked."""
        fetching = Counter(
            live.plan.decode
            for live in streams
            if live.plan is not None and live.fetching_since_s is not None and not live.outcome
        )
        most = self._config.policy.slots_max
        for target, count in fetching.items():
            require(count <= most, f"{count} transfers into {target} hold slots, of {most}")
        return fetching

    def slot_granted(self, asked: SlotAsked, life: int) -> None:
        """Of all proxies: what one life of an agent has granted, and is still used."""
        self._granted[asked] = life
        used = sum(each.target == asked.target and other == life for each, other in self._granted.items())
        most = self._config.policy.slots_max
        require(used <= most, f"{used} transfers into {asked.target} have a slot of its agent, of {most}")

    def slot_left(self, asked: SlotAsked) -> None:
        self._granted.pop(asked, None)

    def check_slot_book(self, streams: Iterable[Live], policy: RecoveryPolicy) -> None:
        """A slot that is held is held for a transfer."""
        held = {target: row["held"] for target, row in policy.snapshot()["slots"].items() if row["held"]}
        fetching = dict(self.check_slots(streams))
        require(held == fetching, f"slots are held: {held}, and used: {fetching}")

    def check_at_rest(self, policy: RecoveryPolicy, who: str) -> None:
        """No stream is left, so nothing is booked."""
        seen = policy.snapshot()
        require(seen["slots"] == {}, f"{who} holds slots: {seen['slots']}")
        require(seen["waiting"] == [], f"{who} has streams waiting: {seen['waiting']}")
        require(set(seen["streams"].values()) == {0}, f"{who} has streams: {seen['streams']}")
        for link in seen["links"]:
            require(link["in_flight_bytes"] == 0, f"{who} books bytes on {link}")
        for row in seen["instances"]:
            booked = (row["work_s"], row["running"], row["decode_streams"], row["retained_streams"])
            require(booked == (0.0, 0, 0, 0), f"{who} books {row}")
        for row in seen["agents"]:
            require((row["booked_bytes"], row["own_streams"]) == (0, 0), f"{who} books {row}")
        require(not seen["checkpoints"] and not seen["unprotected"], f"{who} remembers streams")
