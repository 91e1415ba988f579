"""Price of a replay without the processor: predicted against real, in real time on loopback.

    python -m experiments.parsed_deaths.price [--rounds 3] [--tokens 10 30 ...] [--quick]

A scripted vLLM writes a token every 20 ms. A stream with tools, which only a second run continues,
is cut behind so many tokens; the proxy predicts the time of the recovery before it begins.
"""

import asyncio
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.parsed_deaths.oracle import CHAT
from experiments.parsed_deaths.world import Cluster, open_cluster
from experiments.record import Record
from kvrs_testkit.engine_streams.scripts import TOOLS
from kvrs_testkit.scripted import Fault
from kvrs_testkit.sse import events_of

TOKENS, QUICK_TOKENS = (10, 30, 100, 300, 1000, 2000), (10, 30, 100)
STEP_S = 0.02
BEHIND = 5  # Tokens that follow the cut.
BAR = 0.2
MESSAGES = [{"role": "user", "content": "a"}]
PROMPT_TOKENS = len("user: a\n")


@dataclass(frozen=True, slots=True)
class Point:
    """One recovery."""

    known_tokens: int
    round: int
    predicted_s: float
    real_s: float

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.real_s - 1)


async def points_of(tokens: int, rounds: int) -> list[Point]:
    """Cut a stream behind so many tokens, once a round."""
    points = []
    async with open_cluster("vllm") as cluster:
        script = cluster.servers["d0"].script
        script.prompt_tokens, script.pause_s = PROMPT_TOKENS, STEP_S
        for number in range(rounds):
            calm_ids = await _ids_of(cluster, 4) if not number else None
            assert calm_ids is None or len(calm_ids) == 4
            script.faults = {tokens: Fault.RESET}
            ids = await _ids_of(cluster, tokens + BEHIND)
            assert len(ids) == tokens + BEHIND, len(ids)
            row = (await cluster.state())["recoveries"][-1]
            assert row["option"] == "replay", row
            assert row["produced_tokens"] == tokens, row
            points.append(Point(tokens, number, row["predicted_s"], row["real_s"]))
            print(points[-1], flush=True)
    return points


async def _ids_of(cluster: Cluster, tokens: int) -> list[int]:
    """The ids of a stream that is complete."""
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": tokens, "temperature": 0}
    asked = body | {"model": "tiny", "stream": True, "return_token_ids": True}
    async with cluster.http.post(cluster.url + CHAT, json=asked) as response:
        assert response.status == 200, await response.text()
        *events, done, _ = events_of(await response.read())
    assert done == b"data: [DONE]", done
    choices = [choice for each in events for choice in json.loads(each[6:])["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


async def measured(tokens: Sequence[int], rounds: int) -> list[Point]:
    """All lengths at once, each in a cluster of its own: they wait nearly all the time."""
    found = await asyncio.gather(*(points_of(each, rounds) for each in tokens))
    return [point for points in found for point in points]


def table_of(points: Sequence[Point]) -> Table:
    table = Table("known tokens", "round", "predicted s", "real s", "|predicted/real - 1|")
    for each in points:
        times = f"{each.predicted_s:.3f}", f"{each.real_s:.3f}"
        table.add_row(str(each.known_tokens), str(each.round), *times, f"{each.error:.1%}")
    return table


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--quick", action="store_true", help="short streams only")
    options = parser.parse_args()
    record, console = Record(), Console(record=True, width=100)
    logging.disable(logging.CRITICAL)  # Each cut is a warning.
    tokens = QUICK_TOKENS if options.quick else options.tokens
    points = asyncio.run(measured(tokens, options.rounds))
    median = statistics.median(each.error for each in points)
    console.print(table_of(points))
    console.print(f"median of |predicted/real - 1|: {median:.1%}; bar {BAR:.0%}")
    figures: dict[str, Any] = {
        "step_s": STEP_S,
        "points": [asdict(each) for each in points],
        "median_error": median,
    }
    record.keep(options.out, "price", figures, console.export_text())
    return 1 if median > BAR else 0


if __name__ == "__main__":
    raise SystemExit(main())
