"""The document of `/kvrs/v1/state`: plain data for people and tests."""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import msgspec

from kvrs.core.fleet.known import listed_names, others_of_other_format
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Reload
from kvrs.proxy.api.picked import cluster_load
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.open_stream import OpenStream
from kvrs.proxy.streams.recoveries import Recovery, least_estimates
from kvrs.proxy.watch.gossip_view import GossipView


def describe(
    driver: Driver, gossip_view: GossipView, proxy: dict[str, Any], now_s: float
) -> dict[str, Any]:
    recoveries = [_recovery(recovery) for recovery in driver.recoveries.latest]
    return describe_open(driver, gossip_view, proxy, now_s) | {"recoveries": recoveries}


def describe_open(
    driver: Driver, gossip_view: GossipView, proxy: dict[str, Any], now_s: float
) -> dict[str, Any]:
    """Describe all processes and the open streams."""
    policy = driver.control.policy.snapshot()
    unplaced = policy["unprotected"]
    return {
        **describe_processes(driver, gossip_view, proxy, now_s),
        "policy": policy,
        "streams": [_stream(driver, live, unplaced, now_s) for live in driver.streams.values()],
    }


def describe_processes(
    driver: Driver, gossip_view: GossipView, proxy: dict[str, Any], now_s: float
) -> dict[str, Any]:
    """Describe all processes, without streams and recoveries: metrics, which also use this, count
    these as they end.
    """
    control = driver.control
    policy, gossip = control.policy.cluster_snapshot(), gossip_view.describe()
    health = {row["id"]: row["health"] for row in policy["instances"]}
    reloads, differing = _reloads(driver), _differing(driver)
    transfers = driver.aborted_transfers([*control.instances.present()])
    at = Counter(live.instance for live in driver.streams.values())
    return {
        "instances": [
            _instance(known, driver, health.get(known.id), now_s)
            | {"streams": at[known.id], "differs": known.id in differing}
            | {"aborted_transfers": msgspec.to_builtins(transfers.get(known.id))}
            | _restart(known, reloads.get(known.id))
            for known in control.instances.present()
        ],
        "proxies": [
            {
                **proxy,
                **_model(driver),
                "lacks_tokenizer": lacks_tokenizer(driver),
                "tokens_relayed": control.progress.tokens,
                "load": msgspec.to_builtins(cluster_load(control.instances)),
                "waiting": at[None],
                "unprotected": control.checkpoints.count_unprotected(),
            }
        ],
        "members": [] if gossip is None else gossip.pop("members"),
        "gossip": gossip,
        "agents": [
            _agent(known, driver.agent_backends[known.id].url) for known in control.agents.present()
        ],
        "links": policy["links"],
        "slots": policy["slots"],
        "policy": policy,
    }


def lacks_tokenizer(driver: Driver) -> bool:
    """Return whether streams cannot be continued exactly because the tokenizer is missing: their
    text is pieced together.
    """
    return not driver.tokenizer.available and driver.control.instances.plain is not None


def _model(driver: Driver) -> dict[str, Any]:
    """Describe the model and the place of its files; a model named by a vLLM may have no files
    here.
    """
    files = driver.tokenizer.files
    directory = None if files.directory is None else str(files.directory)
    return {"model": files.name, "model_directory": directory}


def _instance(
    known: Member, driver: Driver, answers: Mapping[str, Any] | None, now_s: float
) -> dict[str, Any]:
    control, load = driver.control, dict[str, Any]()
    if known.load is not None:
        load = msgspec.to_builtins(known.load)
    shown = {
        "id": known.id,
        "role": known.role,
        "node": known.node,
        "url": driver.backends[known.id].url,
        "pid": None if not known.was_up else known.info.pid,
        "worker_pids": [] if not known.was_up else known.info.worker_pids,
        "group": known.group,
        "ranks": [] if not known.was_up else msgspec.to_builtins(known.info.ranks),
        "stages": load.get("stages", []),
        "lends": load.get("lends", []),
        "layout": None if not known.was_up else msgspec.to_builtins(known.info.layout),
        "health": known.health,
        **_ranks(known, now_s),
        "epoch": None if not known.was_up else known.info.epoch,
        "starts": known.starts,
        "models": [] if not known.was_up else listed_names(known.info),
        # Version of a stock engine; None: not known yet, or an engine of kvrs.
        "engine_version": driver.backends[known.id].engine_version,
        "load": load or None,
        # Causes by question of the watch that the instance fails now.
        "failing": {key: of["cause"] for key, of in load.get("failing", {}).items()},
        "prefix_hits": _prefix_hits(known, driver),
        "hand_offs": _hand_offs(known, driver),
        # Given-up calls of this proxy that are kept until their KV has stopped moving.
        "detached_pairs": driver.detached.at.get(known.id, 0),
        "speculation": load.get("speculation"),
        # None: the model has no experts, or the instance one process.
        "experts": load.get("experts"),
        "batches_in_flight": load.get("batches_in_flight"),
        # The policy's view of how the instance answers; None while it is not up.
        "answers": answers,
        # The drain that an operator has ordered, if any.
        "drain": control.drains.describe(known.id, now_s),
        "draining": control.drains.is_draining(known.id),
        "unprotected": control.checkpoints.are_missing(known),
        "self_test": control.self_tests.describe(known.id),
    }
    return shown if known.reason is None else shown | {"reason": known.reason}


def _differing(driver: Driver) -> set[InstanceId]:
    """Return the instances whose weights differ from those of another live instance; two versions
    of an engine may answer differently with equal weights.
    """
    tests, is_up = driver.control.self_tests, driver.control.instances.is_up
    up = {name: life for name, life in tests.processes.items() if is_up(name)}
    pairs = combinations(up, 2)
    return {name for one, two in pairs if tests.differ([up[one], up[two]]) for name in (one, two)}


def _reloads(driver: Driver) -> dict[InstanceId, Reload]:
    """Return the instances that load again, as other instances report them."""
    loads = (known.load for known in driver.control.instances.present())
    reports = (load.speculation for load in loads if load is not None)
    return {
        name: reload
        for report in reports
        if report is not None
        for name, reload in report.reloads.items()
    }


def _restart(known: Member, reload: Reload | None) -> dict[str, Any]:
    """Describe the reload of an instance, which has no ranks yet, or the instance that it is paired
    with.
    """
    if known.health is not Health.UP and reload is not None:
        shown: dict[str, Any] = msgspec.to_builtins(reload)
        return shown
    load = known.load
    if load is None or load.speculation is None:
        return {"paired_with": None}
    helper = {"paired_with": load.speculation.helper}
    return helper if load.full_degree else {"state": "full", **helper}


def _hand_offs(known: Member, driver: Driver) -> dict[str, Any] | None:
    """Describe the format of hand-offs, and the engine's counts, if any; None: not reported, or not
    up.
    """
    report = None if known.load is None else known.load.hand_offs
    if known.load is None or (report is None and not known.info.hand_off_format):
        return None
    others = others_of_other_format(driver.control.instances, known)
    return {
        **({} if report is None else msgspec.to_builtins(report)),
        "format": known.info.hand_off_format,
        "differs_from": others,
    }


def _prefix_hits(known: Member, driver: Driver) -> dict[str, Any] | None:
    """Return the share of this proxy's prompt tokens that the instance's prefix cache had; None:
    not reported.
    """
    hits = driver.control.policy.prefix_hits.get(known.id)
    if hits is None:
        return None
    return {
        "prompt_tokens": hits.prompt_tokens,
        "cached_tokens": hits.cached_tokens,
        "share": round(hits.share, 4),
    }


def _ranks(known: Member, now_s: float) -> dict[str, Any]:
    """Describe the computing ranks of an instance with several; None: no ranks, or not up.

    `ready_in_s`: the instance's prediction while it re-forms.
    """
    load = known.load
    if load is None or not load.full_degree:
        return {"state": None, "degree": None, "full_degree": None, "ready_in_s": None}
    state, ready_in_s = "full" if load.degree >= load.full_degree else "degraded", None
    if load.reforming is not None:
        age_s = now_s - known.reported_s
        state, ready_in_s = "reforming", max(0.0, load.reforming.ready_in_s - age_s)
    return {
        "state": state,
        "degree": load.degree,
        "full_degree": load.full_degree,
        "ready_in_s": ready_in_s,
    }


def _agent(known: Agent, url: str) -> dict[str, Any]:
    info, report = known.info, known.report
    shown = {
        "id": known.id,
        "node": known.node,
        "url": url,
        "pid": None if info is None else info.pid,
        "health": known.health,
        "epoch": None if info is None else info.epoch,
        "reserved_bytes": None if report is None else report.reserved_bytes,
        "held_bytes": None if report is None else report.held_bytes,
        "checkpoints": None if report is None else report.checkpoints,
        "capacity_bytes": None if info is None else info.capacity_bytes,
        "slots": {} if report is None else msgspec.to_builtins(report.slots),
        "regions": [] if report is None else msgspec.to_builtins(report.rows.regions),
        "row_copies": [] if report is None else msgspec.to_builtins(report.rows.copied),
        "refused_rows": None if report is None else report.rows.refused_rows,
    }
    return shown if known.reason is None else shown | {"reason": known.reason}


def _stream(
    driver: Driver, live: OpenStream, unplaced: Mapping[StreamId, str], now_s: float
) -> dict[str, Any]:
    plan = live.attempt.plan
    return {
        "id": live.id,
        "attempt": live.journal.attempt,
        "stage": live.phase,
        "prefill": None if plan is None else plan.prefill,
        "decode": None if plan is None else plan.decode,
        "prompt_tokens": live.journal.prompt_tokens,
        "output_tokens": len(live.journal.output_ids),
        "max_tokens": live.journal.max_tokens,
        "exact": not live.journal.inexact,
        "inexact": list(live.journal.inexact),
        "protected": driver.control.checkpoints.protected(live),
        "unprotected": driver.control.checkpoints.unprotected(live, unplaced),
        "age_s": now_s - live.journal.arrived_s,
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    action, settled = recovery.action, recovery.settled
    return {
        "at_s": recovery.at.wall_s,
        "stream": action.stream,
        "attempt": action.attempt,
        "option": recovery.option,
        "from": action.failed,
        "to": recovery.target,
        "source": recovery.source,
        "cause": action.cause,
        "predicted_s": recovery.predicted_s,
        "low_s": None if settled is None else settled.low_s,
        "high_s": None if settled is None else settled.high_s,
        "real_s": recovery.real_s,
        "gap_s": recovery.gap_s,
        "outcome": recovery.outcome_name,
        "loaded_tokens": recovery.loaded_tokens,
        "computed_tokens": recovery.computed_tokens,
        "adopted_pages": recovery.adopted_pages,
        "recomputed_tokens": recovery.recomputed_tokens,
        "produced_tokens": recovery.produced_tokens,
        "estimates": msgspec.to_builtins(least_estimates(action)),
        "others": action.others,
    }
