"""`/kvrs/v1/overview`: a short form of the state, for pages and terminals that show it every
second. Pure.

A proxy's last 15 minutes in steps of 5 s, for the curves of the live page. Pure.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvrs.core.incidents import Fate, HitStream, Incident, Incidents, RecordedDecision, sentence
from kvrs.core.model import actions as act
from kvrs.protocol.instance import MEMORY
from kvrs.proxy.api.rows import AGENTS, INSTANCES, State, Table, words

INTERVAL_S = 5.0
_KEPT = 180


class Counts(NamedTuple):
    """A proxy's counters at one time."""

    tokens: int  # Output tokens written to clients.
    ttfts: int  # Streams that have ended after a first token,
    ttft_sum_s: float  # and the sum of their times to the first token.
    prompt_tokens: int  # Prompt tokens at instances that report what their prefix cache had,
    cached_tokens: int  # and those of them that were cached.


class Sample(NamedTuple):
    """None: there is no value, because no stream ended, ran or was placed."""

    at_s: float  # Unix time of the sample's end.
    tokens_per_s: float
    # Mean of the open streams that got their first token, else of the streams that ended.
    ttft_s: float | None
    streams: int
    pause_s: float | None  # Longest pause of a stream.
    hit_share: float | None  # Share of new prompts' tokens that instances had cached.


class History:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._last: tuple[float, Counts] | None = None

    def sample(
        self,
        counts: Counts,
        streams: int,
        pause_s: float | None,
        now_s: float,
        wall_s: float,
        *,
        ttfts_s: Sequence[float] = (),
    ) -> None:
        """Add what has happened since the last call; the first call only sets the beginning.
        `ttfts_s`: of the open streams that got their first token.
        """
        last, self._last = self._last, (now_s, counts)
        if last is None or now_s <= last[0]:
            return
        seconds, before = now_s - last[0], last[1]
        ttfts, ttft_sum_s = len(ttfts_s), sum(ttfts_s)
        if not ttfts:
            ttfts = counts.ttfts - before.ttfts
            ttft_sum_s = counts.ttft_sum_s - before.ttft_sum_s
        prompt = counts.prompt_tokens - before.prompt_tokens
        cached = counts.cached_tokens - before.cached_tokens
        self._samples.append(
            Sample(
                round(wall_s),
                round((counts.tokens - before.tokens) / seconds, 1),
                round(ttft_sum_s / ttfts, 4) if ttfts else None,
                streams,
                None if pause_s is None else round(pause_s, 3),
                # Counts of an instance that has restarted begin at 0 again.
                round(cached / prompt, 3) if prompt > 0 and 0 <= cached <= prompt else None,
            )
        )

    def columns(self) -> dict[str, list[float | None]]:
        """Return the samples by name of their values, oldest first."""
        found = zip(*self._samples, strict=True) if self._samples else [()] * len(Sample._fields)
        return {name: [*values] for name, values in zip(Sample._fields, found, strict=True)}


# Most streams whose decisions are shown, those of the newest incidents; attempts of each of them.
STREAMS = 50
ATTEMPTS = 5
LINKS = 200


def overview(
    state: State, policy: Mapping[str, Any], incidents: Incidents, history: History
) -> dict[str, Any]:
    """Make the overview of the state that `/kvrs/v1/state` returns."""
    streams: Sequence[State] = state["streams"]
    memory = {row["target"]: row for row in state["links"] if row["source"] == MEMORY}
    return {
        "proxies": [
            {key: each[key] for key in ("id", "pid", "peers", "lacks_tokenizer")}
            for each in state["proxies"]
        ],
        "policy": policy,
        "instances": [
            _shown(row, INSTANCES) | {"notes": [*_notes(row)]} for row in state["instances"]
        ],
        "agents": [
            _shown({**row, "role": "agent", "memory": memory.get(row["node"])}, AGENTS)
            | {"notes": []}
            for row in state["agents"]
        ],
        "links": [row for row in state["links"] if row["source"] != MEMORY][:LINKS],
        "slots": state["slots"],
        "streams": {
            "open": len(streams),
            "by_stage": dict(Counter(row["stage"] for row in streams)),
            "inexact": sum(not row["exact"] for row in streams),
            "restorable": _restorable(streams),
            "why_not": dict(Counter(row["unprotected"] for row in streams if row["unprotected"])),
        },
        "fates": {fate: incidents.fates[fate] for fate in Fate} | {"running": incidents.running},
        "incidents": [*_incidents(incidents)],
        "history": history.columns(),
    }


def _shown(row: State, table: Table) -> dict[str, Any]:
    """Make the row of a process: its health, and the facts of its table as text."""
    health, reason = row["health"], row.get("reason")
    state = row.get("state")
    if row.get("draining"):
        health = "draining"
    elif health != "up" and state:
        health, reason = state, _restart(row)
    elif state in ("degraded", "reforming"):
        health = state
    return {
        **{key: row[key] for key in ("id", "role", "node")},
        "health": health,
        "is_up": row["health"] == "up",
        "reason": reason,
        "facts": words(table, row),
    }


def _restart(row: State) -> str:
    """Describe the restart of an instance that is not up: the instance that it helps meanwhile,
    when its model is loaded, and what it skipped.
    """
    ready_in_s, skipped = row.get("ready_in_s"), row.get("skipped")
    parts = ["it is being started again"]
    parts += [f"drafts for {row['paired_with']}"] if row.get("paired_with") else []
    parts += [] if ready_in_s is None else [f"its model is there in {ready_in_s:.0f} s"]
    return ", ".join(parts + ([skipped] if skipped else []))


def _notes(row: State) -> Iterator[str]:
    """Yield notes on an instance: its stages, if a stage is borrowed, and the pages
    that it lends.
    """
    if any(each["donor"] for each in row["stages"]):
        places = (f"{each['stage']} at {each['node']}{_donor(each)}" for each in row["stages"])
        yield f"stages {', '.join(places)}"
    for each in row["lends"]:
        yield f"lends {each['pages']} pages of stage {each['stage']} to {each['to']}"


def _donor(stage: State) -> str:
    return f" (borrowed from {stage['donor']})" if stage["donor"] else ""


def _incidents(incidents: Incidents) -> Iterator[dict[str, Any]]:
    """Yield the incidents, newest first."""
    room = STREAMS
    for incident in reversed(incidents.entries):
        shown = [_victim(each) for each in [*incident.victims.values()][:room]]
        room -= len(shown)
        yield {
            "number": incident.number,
            "at_s": incident.at.wall_s,
            "time": str(incident.at),
            "subject": incident.subject,
            "is_loss": incident.is_loss,
            "sentence": sentence(incident),
            "state": _state(incident),
            "streams": shown,
            "others": incident.fates.total() - len(shown),
        }


def _state(incident: Incident) -> str:
    if incident.fates[Fate.LOST]:
        return "lost"
    return "over" if incident.is_over else "open"


def _victim(victim: HitStream) -> dict[str, Any]:
    return {
        "stream": victim.stream,
        "fate": victim.fate,
        "pause_s": victim.pause_s,
        "attempts": [_attempt(each, victim) for each in victim.decisions[-ATTEMPTS:]],
    }


def _failure(decision: RecordedDecision) -> str:
    """Return why the stream was given up or decided again; empty: neither."""
    given_up = isinstance(decision.action, act.GiveUp)
    return decision.cause if given_up else decision.retried_for


def _attempt(decision: RecordedDecision, victim: HitStream) -> dict[str, Any]:
    return {
        "way": decision.way,
        "cause": decision.cause,
        "failed": _failure(decision),
        "outcome": decision.outcome(victim),
        "predicted_s": decision.predicted_s,
        "low_s": getattr(decision.settled, "low_s", None),
        "high_s": getattr(decision.settled, "high_s", None),
        "real_s": getattr(decision.settled, "real_s", None),
        "off": decision.off,
        # Costs of options have their intervals by it.
        "interval_factor": decision.interval_factor,
        # Few bytes: most values are empty.
        "options": [
            {key: value for key, value in each._asdict().items() if value}
            for each in decision.costs
        ],
    }


def _restorable(streams: Sequence[State]) -> dict[str, Any]:
    """Count the streams whose pages an agent keeps, in total and by agent."""
    by_agent: Counter[str] = Counter()
    for row in streams:
        by_agent.update(agent for agent, pages in row["protected"].items() if pages)
    return {
        "streams": sum(any(row["protected"].values()) for row in streams),
        "by_agent": dict(by_agent),
    }
