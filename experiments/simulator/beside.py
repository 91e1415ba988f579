"""Requests, a switch for each known difference, and the table: what comparisons with other
simulators have in common.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrs.config.file import parse_config
from kvrs_lab.report import metrics
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from kvrs_lab.traces.records import StreamRecord

BEGIN_S = 2.0  # Before it, proxies get to know their instances.
BAR = 0.05
MOST_PREFILL = 65_536  # Tokens of a batch: more than wait at any load here.
OFF = "all differences off"
_LINK_BYTES_PER_S = 3.125e9  # 25 Gbit/s.


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    tokens: int
    output: int  # After the first token.


def requests_of(
    preset: str, rate: float, count: int, seed: int, *, most_prompt: int, most_output: int
) -> list[Asked]:
    settings = replace(PRESETS[preset], requests=count, requests_per_s=rate)
    return [
        Asked(
            each.arrival_s,
            min(each.input_tokens, most_prompt),
            max(1, min(each.output_tokens, most_output)),
        )
        for each in generate(settings, seed).requests
    ]


@dataclass(frozen=True, slots=True)
class Latencies:
    ttft_s: list[float]
    tpot_s: list[float]


@dataclass(frozen=True, slots=True)
class Differences:
    """True: as the product has it, and not as the other simulator."""

    hand_off: bool = False  # Takes its bytes at 25 Gbit/s.
    network: bool = False  # Messages take 0.1 to 3 ms. Theirs take no time.
    overhead: bool = False  # A step has none beside its fit.
    first_token: bool = False  # The decode instance's.
    chunks: bool = False  # Prefill in chunks of 512 tokens. Theirs is of whole prompts.


def ours(
    asked: Sequence[Asked], differ: Differences, pace: str, link_bytes_per_s: float
) -> Latencies:
    """One prefill and one decode instance of that pace. The link is that of the other simulator,
    where its hand-off is no difference.
    """
    nodes = [
        {"id": f"n{n}", "instances": [{"id": role, "role": role}]}
        for n, role in enumerate(("prefill", "decode"))
    ]
    rate = _LINK_BYTES_PER_S if differ.hand_off else link_bytes_per_s
    longest = max(each.tokens + each.output + 1 for each in asked)
    config = parse_config(
        {
            "cluster": {
                "engine": {
                    "pace": pace,
                    "pages": 1 << 17,
                    "max_running": 4096,
                    "max_model_len": max(2048, longest),
                    "max_batch_tokens": 512 if differ.chunks else MOST_PREFILL,
                },
                "nodes": nodes,
            },
            "backup": {"mode": "off"},
            "transfer": {"link_bytes_per_s": rate},
        }
    )
    arrivals = [
        Arrival(BEGIN_S + each.at_s, [number + 1, *range(100, 99 + each.tokens)], each.output + 1)
        for number, each in enumerate(asked)
    ]
    kind = FirstToken.DECODE if differ.first_token else FirstToken.PREFILL
    world = World(config, arrivals, [], seed=0, first_token=kind)
    if not differ.network:
        for proxy in world.cluster.serving:
            proxy.be_near()
    world.run()
    return _of(records_of(arrivals, world.cluster.proxies))


def _of(records: Sequence[StreamRecord]) -> Latencies:
    assert all(record.completed for record in records)
    return Latencies(
        [metrics.arrival_ttft_s(record) or 0.0 for record in records],
        [metrics.tpot_s(record) or 0.0 for record in records],
    )


PICKED: dict[str, Callable[[Latencies], list[float]]] = {
    "ttft": lambda found: found.ttft_s,
    "tpot": lambda found: found.tpot_s,
}


def row_of(rate: float, name: str, left: Latencies, right: Latencies) -> dict[str, Any]:
    """Percentiles of ours, and of theirs."""
    row: dict[str, Any] = {"rate": rate, "case": name}
    for key, pick in PICKED.items():
        one, other = pick(left), pick(right)
        for q in (50, 90, 99):
            mine, published = metrics.percentile(one, q), metrics.percentile(other, q)
            assert mine is not None
            assert published is not None
            row |= {f"{key}_p{q}_s": mine, f"{key}_p{q}_theirs_s": published}
    return row


def _error(row: dict[str, Any], name: str) -> float:
    return float(row[f"{name}_s"] / row[f"{name}_theirs_s"] - 1)


def as_text(rows: Sequence[dict[str, Any]], title: str, whose: str) -> str:
    names = [f"{key}_p{q}" for key in PICKED for q in (50, 90, 99)]
    lines = [
        title,
        f"{'requests/s':>10}  {'':24}" + "".join(f"{name.replace('_', ' '):>20}" for name in names),
    ]
    for row in rows:
        cells = "".join(f"{row[f'{n}_s'] * 1e3:>11.1f} ms {_error(row, n):>+5.1%}" for n in names)
        lines.append(f"{row['rate']:>10g}  {row['case']:24}{cells}")
    most = largest(rows)
    verdict = "met" if most <= BAR else "MISSED"
    lines += [
        "",
        f"in each cell: ours, and how far it is from {whose} simulator",
        f"largest error of a median with all differences off: {most:.2%}; bar {BAR:.0%}: {verdict}",
    ]
    return "\n".join(lines)


def largest(rows: Sequence[dict[str, Any]]) -> float:
    """The error of a median with all differences off, of the load where it is largest."""
    off = [row for row in rows if row["case"] == OFF]
    return max(abs(_error(row, name)) for row in off for name in ("ttft_p50", "tpot_p50"))
