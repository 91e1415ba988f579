"""What `/kvrs/v1/state` shows: plain data, for people and tests."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvrs.ids import StreamId
from kvrs.proxy.driver import Driver
from kvrs.proxy.hearsay import Hearsay
from kvrs.proxy.instances import Health, Known
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.recoveries import Recovery
from kvrs.proxy.streams import LiveStream


def describe(driver: Driver, hearsay: Hearsay, proxy: dict[str, Any], now_s: float) -> dict[str, Any]:
    policy, gossip = driver.policy.snapshot(), hearsay.describe()
    return {
        "instances": [_instance(known) for known in driver.instances.known.values()],
        "proxies": [proxy],
        "members": [] if gossip is None else gossip.pop("members"),
        "gossip": gossip,
        "agents": driver.checkpoints.describe(),
        "links": policy["links"],
        "slots": policy["slots"],
        "streams": [_stream(driver, live, policy["unprotected"], now_s) for live in driver.streams.values()],
        "recoveries": [_recovery(recovery) for recovery in driver.recoveries.entries],
        "policy": policy,
    }


def measure(driver: Driver, hearsay: Hearsay, metrics: Metrics) -> None:
    """Set the gauges that nobody needs to set at every change."""
    metrics.unprotected.set(driver.checkpoints.count_unprotected(driver.instances.sends_checkpoints))
    for known in driver.instances.known.values():
        if known.load is not None:
            metrics.checkpoint_lag.labels(known.id).set(known.load.checkpoint_lag_pages)
            metrics.damaged.labels(known.id).set(known.load.damaged_pages)
        else:
            metrics.checkpoint_lag.remove(known.id)
            metrics.damaged.remove(known.id)
    for agent in driver.checkpoints.agents.known.values():
        metrics.agent_up.labels(agent.id).set(agent.health is Health.UP)
        metrics.agent_reserved.labels(agent.id).set(0 if agent.report is None else agent.report.reserved_bytes)
    if (membership := hearsay.membership) is not None:
        metrics.gossip.measure(membership)
    for option, factor in driver.policy.snapshot()["corrections"].items():
        metrics.correction.labels(option).set(factor)


def _instance(known: Known) -> dict[str, Any]:
    shown = {
        "id": known.id,
        "role": known.role,
        "node": known.node,
        "url": known.backend.url,
        "pid": None if known.info is None else known.info.pid,
        "worker_pids": [] if known.info is None else known.info.worker_pids,
        "health": known.health,
        "epoch": None if known.info is None else known.info.epoch,
        "load": None if known.load is None else msgspec.to_builtins(known.load),
    }
    return shown if known.reason is None else shown | {"reason": known.reason}


def _stream(driver: Driver, live: LiveStream, unplaced: Mapping[StreamId, str], now_s: float) -> dict[str, Any]:
    return {
        "id": live.id,
        "attempt": live.journal.attempt,
        "stage": live.stage,
        "prefill": None if live.plan is None else live.plan.prefill,
        "decode": None if live.plan is None else live.plan.decode,
        "prompt_tokens": live.journal.prompt_tokens,
        "output_tokens": len(live.journal.output_ids),
        "max_tokens": live.journal.max_tokens,
        "exact": not live.journal.inexact,
        "inexact": list(live.journal.inexact),
        "protected": driver.checkpoints.protected(live),
        "unprotected": driver.checkpoints.unprotected(live, driver.instances.sends_checkpoints, unplaced),
        "age_s": now_s - live.journal.arrived_s,
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "at_s": recovery.at_s,
        "stream": recovery.stream,
        "attempt": recovery.attempt,
        "option": recovery.option,
        "from": recovery.failed,
        "to": recovery.target,
        "cause": recovery.cause,
        "raw_s": recovery.raw_s,
        "predicted_s": recovery.predicted_s,
        "real_s": recovery.real_s,
        "regret_s": recovery.regret_s,
        "gap_s": recovery.gap_s,
        "outcome": recovery.outcome,
        "produced_tokens": recovery.produced_tokens,
        "estimates": msgspec.to_builtins(recovery.estimates),
    }
