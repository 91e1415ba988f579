"""What `/kvrs/v1/state` shows: plain data, for people and tests."""

from typing import Any

import msgspec

from kvrs.proxy.driver import Driver
from kvrs.proxy.instances import Known
from kvrs.proxy.recoveries import Recovery
from kvrs.proxy.streams import LiveStream


def describe(driver: Driver, proxy: dict[str, Any], now_s: float) -> dict[str, Any]:
    policy = driver.policy.snapshot()
    return {
        "instances": [_instance(known) for known in driver.instances.known.values()],
        "proxies": [proxy],
        "agents": [],
        "links": policy["links"],
        "slots": policy["slots"],
        "streams": [_stream(live, now_s) for live in driver.streams.values()],
        "recoveries": [_recovery(recovery) for recovery in driver.recoveries.entries],
        "policy": policy,
    }


def _instance(known: Known) -> dict[str, Any]:
    shown = {
        "id": known.id,
        "role": known.role,
        "node": known.node,
        "url": known.backend.url,
        "pid": None if known.info is None else known.info.pid,
        "health": known.health,
        "epoch": None if known.info is None else known.info.epoch,
        "load": None if known.load is None else msgspec.to_builtins(known.load),
    }
    return shown if known.reason is None else shown | {"reason": known.reason}


def _stream(live: LiveStream, now_s: float) -> dict[str, Any]:
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
        "predicted_s": recovery.predicted_s,
        "real_s": recovery.real_s,
        "gap_s": recovery.gap_s,
        "outcome": recovery.outcome,
        "produced_tokens": recovery.produced_tokens,
        "estimates": msgspec.to_builtins(recovery.estimates),
    }
