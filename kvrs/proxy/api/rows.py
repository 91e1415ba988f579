"""Tables of the facts that `/metrics`, the live page and `kvrs top` show of an instance, an agent
and the proxy, with their names. Pure.

A row reads the plain data of `/kvrs/v1/state`, which `state.py` makes from the core's objects.

`/kvrs/v1/overview`: a short form of the state, for pages and terminals that show it every
second. Pure.

A proxy's last 15 minutes in steps of 5 s, for the curves of the live page. Pure.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrs.core.incidents import Fate, HitStream, Incident, Incidents, RecordedDecision, sentence
from kvrs.core.model import actions as act
from kvrs.gossip.wire import Status
from kvrs.protocol.instance import MEMORY, PREFIX
from kvrs.protocol.pages import TrafficClass

Labels = tuple[str, ...]  # Values of a row's labels.
State = Mapping[str, Any]  # Plain data: the whole state, or the row of an instance or an agent.

KV_KINDS = (*(traffic.label for traffic in TrafficClass), PREFIX)


class Row(NamedTuple):
    """A fact of an instance, an agent or the proxy. With a help text it is also a series in
    `/metrics`, under its name. A fact without a value is not shown.
    """

    # Dotted path of the value in the data, or a function that finds the value: a number, or numbers
    # by labels.
    read: str | Callable[[State], Any]
    help: str = ""
    labels: str = ""  # Names of the series' labels; empty: no labels.
    # Heading on the page and in `kvrs top`; also the name of a fact without a help text.
    heading: str = ""
    form: str = "{}"  # Format of the value that follows the heading.
    # Labels for which a total is shown as 0 before the first report.
    from_start: tuple[Labels, ...] = ()

    def value(self, data: State) -> Any:
        return at(data, self.read) if isinstance(self.read, str) else self.read(data)

    def samples(self, data: State) -> Mapping[Labels, float]:
        found = self.value(data)
        if found is None:
            return {}
        if isinstance(found, Mapping):
            return found
        return {(data["role"],) if self.labels == "role" else (): found}


Table = Mapping[str, Row]


def at(data: Any, path: str) -> Any:
    """Return the value at a dotted path; None: no value."""
    for key in path.split("."):
        if data is None:
            return None
        data = data.get(key)
    return data


def _of_ranks(key: str) -> Callable[[State], Any]:
    """Make a function that reads `load.<key>` of an instance with several ranks; None: the instance
    has one process, or is not up.
    """
    return lambda row: at(row, f"load.{key}") if at(row, "load.full_degree") else None


def _in_group(count: Callable[[State], int]) -> Callable[[State], Any]:
    return lambda row: None if row["group"] is None or row["load"] is None else count(row)


def _ring(row: State) -> dict[Labels, float]:
    """Return the pages by which replication lags, by stage, for stages that replicate pages to
    other instances, or should.
    """
    return {
        (str(each["stage"]),): each["replica_lag_pages"]
        for each in row["stages"]
        if each["replica_to"] or each["unprotected"]
    }


def _replica_pages(row: State) -> Any:
    kept, dropped = at(row, "load.replica_pages"), at(row, "load.replica_dropped_pages")
    return kept if kept or dropped else None


def _kv_bytes(row: State) -> Any:
    found = at(row, "load.kv_bytes")
    return None if found is None else {(kind,): found.get(kind, 0) for kind in KV_KINDS}


def _prompt_tokens(row: State) -> Any:
    if (hits := row["prefix_hits"]) is None:
        return None
    computed_tokens = hits["prompt_tokens"] - hits["cached_tokens"]
    return {("computed",): computed_tokens, ("cached",): hits["cached_tokens"]}


def _drafts(row: State) -> Any:
    if (drafts := row["speculation"]) is None:
        return None
    source = drafts["source"]
    return {
        (source, "accepted"): drafts["accepted"],
        (source, "rejected"): max(0, drafts["proposed"] - drafts["accepted"]),
        (source, "stale"): drafts["stale"],
    }


def _hand_off_faults(row: State) -> Any:
    if (counts := at(row, "load.hand_offs")) is None:
        return None
    keys = {"failed": "failed_transfers", "expired": "expired", "late": "late_notices"}
    return {(kind,): counts[key] for kind, key in keys.items()}


def _ranks_shown(row: State) -> Any:
    if row.get("state") in ("degraded", "reforming"):
        return f"{row['degree']} of {row['full_degree']}"
    return len(row["ranks"]) if len(row["ranks"]) > 1 else None


def _starts_shown(row: State) -> Any:
    starts = row["starts"]
    return {0: None, 1: "once"}.get(starts, f"{starts} times")


def _drafts_shown(row: State) -> Any:
    drafts = row["speculation"]
    return f"{drafts['accepted']} of {drafts['proposed']}" if at(drafts, "proposed") else None


INSTANCES = {
    "kvrs_worker_up": Row(
        lambda row: row["health"] == "up", "1 while the worker is in use, else 0."
    ),
    "kvrs_worker_ejected": Row(
        lambda row: bool(at(row, "answers.ejected")), "1 while it is ejected, else 0."
    ),
    "kvrs_worker_differs": Row(
        "differs", "1 while it has other weights than another worker that is up, else 0."
    ),
    "kvrs_worker_unprotected": Row(
        "unprotected", "1 while it decodes and no agent gets KV of its streams, else 0."
    ),
    "kvrs_worker_store_wrong": Row(
        lambda row: bool(at(row, "self_test.store.is_wrong")),
        "1 while it goes on wrongly behind KV of its store, else 0.",
    ),
    "kvrs_worker_draining": Row(
        "draining", "1 while the worker gets no new streams, by order or because it ends, else 0."
    ),
    "kvrs_worker_question_failing": Row(
        lambda row: {(question,): 1 for question in row["failing"]} or None,
        "1 while the worker fails this question of its watch; none: it fails no question.",
        "question",
    ),
    "kvrs_worker_streams": Row(
        "streams", "Open streams of this proxy at the worker.", "role", heading="streams"
    ),
    "kvrs_worker_detached_pairs": Row(
        "detached_pairs",
        "Given-up calls of this proxy there that are kept until their KV has stopped moving.",
    ),
    "kvrs_worker_queued_requests": Row(
        "load.queued",
        "Requests of all proxies in the queue of the worker.",
        "role",
        heading="queued",
    ),
    "kvrs_worker_queue_seconds": Row(
        "load.queue_delay_s",
        "Time that a request which arrives now waits at the worker, by its own prediction.",
        "role",
        heading="wait",
        form="{:.2f} s",
    ),
    "kvrs_worker_free_pages": Row(
        "load.free_pages", "KV pages of the worker that are free.", "role"
    ),
    "ranks": Row(_ranks_shown),
    "kvrs_worker_degree": Row(
        _of_ranks("degree"), "Ranks that compute, of a worker that has several.", "role"
    ),
    "kvrs_worker_full_degree": Row(
        _of_ranks("full_degree"), "Ranks that a worker of several was configured with.", "role"
    ),
    "kvrs_worker_rank_deaths_total": Row(
        _of_ranks("rank_deaths"), "Ranks that a worker of several has lost, and goes on without."
    ),
    "kvrs_instance_expert_skew": Row(
        "experts.skew",
        "Load of the rank with most to do over the mean one, for experts chosen lately.",
        "role",
        heading="skew",
        form="{:.2f}",
    ),
    "kvrs_instance_expert_copies": Row(
        "experts.copies", "Copies of experts, beside their owners'.", "role", heading="copies"
    ),
    "kvrs_expert_rebalances_total": Row(
        "experts.rebalances", "Changes of copies of experts on the worker's ranks."
    ),
    "cached": Row("prefix_hits.share", form="{:.0%}"),
    "kvrs_worker_prompt_tokens_total": Row(
        _prompt_tokens,
        "Tokens of new prompts that the worker answered for: computed, or cached there.",
        "source",
    ),
    "started": Row(_starts_shown),
    "drafts by": Row("paired_with"),
    "accepted": Row(_drafts_shown),
    "kvrs_draft_tokens_total": Row(
        _drafts,
        "Drafts that came to the worker's engine: accepted, rejected, or stale when it was their "
        "turn.",
        "source outcome",
    ),
    "kvrs_worker_kv_bytes_total": Row(
        _kv_bytes,
        "KV that the worker has fetched, for recoveries, hand-offs or new prompts, or has sent as "
        "checkpoints.",
        "kind",
        from_start=tuple((kind,) for kind in KV_KINDS),
    ),
    "kvrs_damaged_pages_total": Row(
        "load.damaged_pages", "Damaged pages that the worker has fetched.", from_start=((),)
    ),
    "kvrs_hand_off_faults_total": Row(
        _hand_off_faults,
        "Hand-offs of vLLM by NIXL's counters: failed, never read, or read behind their lease.",
        "kind",
    ),
    "kvrs_checkpoint_lag_pages": Row(
        "load.checkpoint_lag_pages",
        "Full pages of protected streams that the worker has not sent to an agent yet.",
    ),
    "kvrs_replica_pages": Row(_replica_pages, "Pages that the worker keeps for other ones."),
    "kvrs_replica_lag_pages": Row(
        _ring, "Full pages of which the stage's part is not at its target yet.", "stage"
    ),
    "kvrs_adopted_pages_total": Row(
        lambda row: at(row, "load.adopted_pages") if _ring(row) else None,
        "Pages that streams of the worker went on with out of a donor's replicas.",
    ),
    "kvrs_lent_pages": Row(
        _in_group(lambda row: sum(each["pages"] for each in row["lends"])),
        "Pages of its stages that the worker lends others.",
    ),
    "kvrs_borrowed_stages": Row(
        _in_group(lambda row: sum(each["donor"] is not None for each in row["stages"])),
        "Stages of the worker that the host of another one computes.",
    ),
}


def _memory_shown(row: State) -> Any:
    """Return the rate from the agent's memory to the instances of its node, where streams have been
    restored from it.
    """
    rate = at(row, "memory.bytes_per_s")
    return None if rate is None else f"{rate / 1e9:.1f} GB/s"


def _regions(row: State) -> dict[Labels, float]:
    alive = [each["is_alive"] for each in row["regions"]]
    return {("alive",): alive.count(True), ("dead",): alive.count(False)}


AGENTS = {
    "kvrs_agent_up": Row(lambda row: row["health"] == "up", "1 while the agent is in use, else 0."),
    "checkpoints": Row("checkpoints"),
    "held": Row(
        lambda row: None if row["held_bytes"] is None else row["held_bytes"] / 1e6, form="{:.0f} MB"
    ),
    "loads at": Row(_memory_shown),
    "kvrs_agent_reserved_bytes": Row(
        lambda row: row["reserved_bytes"] or 0,
        "Memory that the agent has reserved for streams of all proxies.",
    ),
    "kvrs_agent_regions": Row(
        _regions,
        "CPU tiers of vLLM whose rows the agent serves, by whether their engine lives.",
        "engine",
    ),
    "kvrs_agent_refused_rows_total": Row(
        "refused_rows",
        "Rows of engines and second copies that the agent refused, because they had changed since "
        "their checksums were made.",
    ),
}


def _model(state: State) -> dict[Labels, float]:
    names = (row["models"][0] for row in state["instances"] if row["models"])
    return {(name,): 1 for name in [*names][:1]}


def _links(state: State) -> dict[Labels, float]:
    return {
        (row["source"], row["target"]): row["bytes_per_s"]
        for row in state["links"]
        if row["measured"]
    }


def _members(state: State) -> Any:
    if state["gossip"] is None:
        return None
    found = Counter(row["status"] for row in state["members"])
    return {(name,): found[name] for name in (status.name.lower() for status in Status)}


def _by_key(path: str) -> Callable[[State], Any]:
    """Make a function that reads the mapping at `path`, with its keys as labels."""
    return lambda state: {(str(key),): value for key, value in (at(state, path) or {}).items()}


def _of_proxy(key: str) -> Callable[[State], Any]:
    return lambda state: at(state["proxies"][0], key)


PROXY = {
    "kvrs_tokens_relayed_total": Row(
        _of_proxy("tokens_relayed"), "Output tokens written to clients."
    ),
    "kvrs_streams_waiting": Row(
        _of_proxy("waiting"), "Open streams that have no place at a worker now."
    ),
    "kvrs_queued_requests": Row(
        _of_proxy("load.queued"), "Requests of all proxies in the queues of all workers."
    ),
    "kvrs_running_requests": Row(
        _of_proxy("load.running"), "Requests of all proxies that all workers compute."
    ),
    "kvrs_kv_usage_ratio": Row(
        _of_proxy("load.kv_usage"), "Share of the KV pages in use, of all workers that decode."
    ),
    "kvrs_streams_unprotected": Row(
        _of_proxy("unprotected"), "Open streams that should have a checkpoint and have none."
    ),
    "kvrs_peers_unreached": Row(
        lambda state: sum(health != "up" for health in _of_proxy("peers")(state).values()),
        "Other proxies, workers of this one included, where no stream can be resumed now.",
    ),
    "kvrs_proxy_starved": Row(
        _of_proxy("starved.now"),
        "1 while the proxy's own event loop is so late that silence blames no process, else 0.",
    ),
    "kvrs_proxy_starved_spells_total": Row(
        _of_proxy("starved.spells"), "Spells in which the proxy's own event loop was late."
    ),
    "kvrs_tokenizer_missing": Row(
        _of_proxy("lacks_tokenizer"),
        "1 while streams are continued inexactly for want of a tokenizer.json, else 0.",
    ),
    "kvrs_config_last_reload_successful": Row(
        _of_proxy("last_reload_succeeded"),
        "0 if the last reload of the configuration was refused, else 1.",
    ),
    "kvrs_model_info": Row(_model, "1 for the model that is served.", "model_name"),
    "kvrs_link_bytes_per_second": Row(
        _links, "Measured bandwidth of the link between two nodes.", "source target"
    ),
    "kvrs_recovery_interval_factor": Row(
        "policy.spread.interval_factor",
        "Factor from a predicted recovery to the ends of the interval of nine of ten real ones.",
    ),
    "kvrs_gossip_members": Row(_members, "Members of the group by status.", "status"),
    "kvrs_gossip_health": Row("gossip.health", "Lifeguard local health score (0 = healthy)."),
    "kvrs_gossip_dropped_packets_total": Row(
        _by_key("gossip.dropped"), "Packets dropped, by reason.", "reason"
    ),
    "kvrs_gossip_unread_facts_total": Row(
        "gossip.unread", "Facts of other members that could not be read."
    ),
}
# Each table, with the key of its data in the state and the label that names its rows.
TABLES: tuple[tuple[Table, str | None, Labels], ...] = (
    (INSTANCES, "instances", ("worker",)),
    (AGENTS, "agents", ("agent",)),
    (PROXY, None, ()),
)
_TOTAL = "_total"


def words(table: Table, data: State) -> dict[str, str]:
    """Return the facts for the page and `kvrs top` as text, by heading."""
    found = {}
    for name, row in table.items():
        heading = row.heading if row.help else name
        if heading and (value := row.value(data)) is not None:
            found[heading] = row.form.format(value)
    return found


class StateSeries(Collector):
    """Series of all tables, read at each scrape. A gauge ends with its process. A total goes on
    rising when the process restarts at 0, and stays when the process is gone.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        # Sum over all runs of the process, and the last reported value, by series and labels.
        self._totals: dict[str, dict[Labels, tuple[float, float]]] = {}

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for table, key, label in TABLES:
            found = [((), state)] if key is None else [((row["id"],), row) for row in state[key]]
            for series, row in table.items():
                if row.help and (values := self._values(series, row, found)):
                    is_total, keys = series.endswith(_TOTAL), (*label, *row.labels.split())
                    kind = "counter" if is_total else "gauge"
                    family = Metric(series.removesuffix(_TOTAL), row.help, kind)
                    for labels, value in values.items():
                        family.add_sample(series, dict(zip(keys, labels, strict=True)), value)
                    yield family

    def _values(
        self, series: str, row: Row, found: Sequence[tuple[Labels, State]]
    ) -> dict[Labels, float]:
        values = {
            (*name, *labels): float(value)
            for name, data in found
            for labels, value in row.samples(data).items()
        }
        if not series.endswith(_TOTAL):
            return values
        totals = self._totals.setdefault(series, {})
        for name, _ in found:
            for labels in row.from_start:
                totals.setdefault((*name, *labels), (0.0, 0.0))
        for each, value in values.items():
            total, last = totals.get(each, (0.0, 0.0))
            totals[each] = total + (value - last if value >= last else value), value
        return {labels: total for labels, (total, _) in totals.items()}


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
