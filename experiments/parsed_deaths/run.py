"""Deaths at random bytes of streams with parsed output, in three APIs; each answer is compared with
the calm run of the same request.

    python -m experiments.parsed_deaths.run [--deaths 2000] [--seed 1] [--quick] [--out DIR]
    python -m experiments.parsed_deaths.run --differ 0.002  # Each token of a second run may differ.

All is in one process, in memory and virtual time: a proxy, and servers that play recordings of real
vLLM and SGLang servers.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.parsed_deaths.asked import Asked, drawn, usable
from experiments.parsed_deaths.oracle import Answer, Verdict, counted, judge, read
from experiments.parsed_deaths.world import (
    DECODES,
    Cluster,
    Death,
    Engine,
    known_tokens,
    open_cluster,
)
from experiments.record import Record
from kvrs.core.books.learning import Differences
from kvrs_testkit.memory_loop import MemoryLoop

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
SGLANG_EACH = 4  # Each fourth death is one of SGLang.
DEATHS, QUICK_DEATHS = 2000, 60
WHOLE_BAR = 0.95
# SGLang draws its random numbers in an order that depends on the batch: a stream with a temperature
# is not generated again there, and ends with an error.
WITH_BAR = ("vllm", "sglang, greedy", "sglang, whole")
BARS = (
    "half calls shown as complete",
    "twice or other text",
    "thought in content",
    "broken connections",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One death and what came of it."""

    number: int
    engine: Engine
    asked: Asked
    at_byte: int
    of_bytes: int
    known_tokens: int  # In the events before the death.
    options: tuple[str, ...]  # Of the recoveries.
    outcomes: tuple[str, ...]
    verdict: Verdict

    @property
    def replays(self) -> list[str]:
        """The outcomes of the second runs."""
        found = zip(self.options, self.outcomes, strict=True)
        return [outcome for option, outcome in found if option == "replay"]


@dataclass(frozen=True, slots=True)
class _Draw:
    number: int
    asked: Asked
    rng: random.Random


@dataclass
class Deaths:
    """Draws deaths, and judges the answers; the same seed draws the same ones."""

    seed: int
    differ: float = 0.0  # Probability that a token of a second run differs.
    only: Sequence[Engine] = ENGINES
    clusters: dict[Engine, Cluster] = field(default_factory=dict)
    # What the proxies have learned of differences, by engine.
    learned: dict[Engine, Differences] = field(default_factory=lambda: defaultdict(Differences))
    failed_calm: dict[str, str] = field(default_factory=dict)  # Requests that fail without a death.
    _calm: dict[tuple[Asked, int | None], tuple[Answer, int]] = field(default_factory=dict)

    async def rows(self, count: int) -> list[Row]:
        """Draw and judge `count` deaths, those of one recording at one cluster: a cluster has one
        model, whose parsers its proxy gets to know.
        """
        by_recording: dict[tuple[Engine, str], list[_Draw]] = defaultdict(list)
        for number in range(count):
            rng = random.Random(f"{self.seed}/{number}")
            engine = self.only[-1] if number % SGLANG_EACH == SGLANG_EACH - 1 else self.only[0]
            asked = drawn(rng, usable(engine))
            by_recording[engine, asked.recording].append(_Draw(number, asked, rng))
        rows = list[Row]()
        for (engine, _), draws in by_recording.items():
            async with open_cluster(engine, draws[0].asked.played) as cluster:
                self.clusters[engine] = cluster
                rows += [row for draw in draws if (row := await self._row(engine, draw))]
                found = cluster.proxy.parts.driver.control.policy.state.differences
                self.learned[engine].tokens += found.tokens
                self.learned[engine].found += found.found
                assert not cluster.violations, (engine, cluster.violations[:5])
        return sorted(rows, key=lambda row: row.number)

    async def _row(self, engine: Engine, draw: "_Draw") -> Row | None:
        """Judge one death; None: the request fails without a death."""
        while True:  # A few deaths come behind the end, because the clients' bytes are counted.
            found = await self._death(draw.number, engine, draw.asked, draw.rng)
            if found is not None and found.verdict.is_wrong:
                print(shown(found), file=sys.stderr, flush=True)
            if found is not None or f"{draw.asked.recording} {draw.asked.api}" in self.failed_calm:
                return found

    async def _death(
        self, number: int, engine: Engine, asked: Asked, rng: random.Random
    ) -> Row | None:
        cluster = self.clusters[engine]
        calm, length = await self._calm_run(cluster, asked, None)
        if calm.broken or calm.error is not None or not is_as_played(asked, calm):
            said = str(calm.error or calm.broken or "other calls")
            self.failed_calm[f"{asked.recording} {asked.api}"] = said
            return None
        differs = {name: at for name in DECODES if (at := self._differs_at(asked, rng)) is not None}
        at_byte = rng.randint(0, length)
        before = set(cluster.recoveries)
        death = Death(at_byte=at_byte, differs=dict(differs))
        got = await cluster.ask_for(asked.played, asked.api, asked.body(), death)
        if death.victim is None:
            return None
        others = sorted({at for name, at in differs.items() if name != death.victim})
        variants = [(await self._calm_run(cluster, asked, at))[0] for at in others]
        answer = read(
            asked.api,
            is_stream=asked.is_stream,
            status=got.status,
            body=got.body,
            ended=got.ended,
        )
        recoveries = [each for each in cluster.recoveries if each not in before]
        return Row(
            number,
            engine,
            asked,
            at_byte,
            length,
            known_tokens(asked.played, at_byte, is_stream=asked.is_stream),
            tuple(each.option.value for each in recoveries),
            tuple(each.outcome_name for each in recoveries),
            judge(answer, [calm, *variants]),
        )

    def _differs_at(self, asked: Asked, rng: random.Random) -> int | None:
        """Return the first position at which a server's run differs, or None."""
        return next(
            (n for n in range(len(asked.played.ids) - 1) if rng.random() < self.differ), None
        )

    async def _calm_run(
        self, cluster: Cluster, asked: Asked, differs: int | None
    ) -> tuple[Answer, int]:
        """The answer without a death, and the length of the server's body."""
        if (asked, differs) not in self._calm:
            death = Death(differs_first=differs)
            got = await cluster.ask_for(asked.played, asked.api, asked.body(), death)
            answer = read(
                asked.api,
                is_stream=asked.is_stream,
                status=got.status,
                body=got.body,
                ended=got.ended,
            )
            self._calm[asked, differs] = answer, cluster.body_bytes(death)
        return self._calm[asked, differs]


def is_as_played(asked: Asked, calm: Answer) -> bool:
    """Return whether a calm run has the calls that the engine has sent, streamed or whole."""
    message = json.loads(bytes(asked.played.whole))["message"]
    whole = [each["function"] for each in message.get("tool_calls") or ()]
    sent = asked.played.calls, [(each["name"], json.loads(each["arguments"])) for each in whole]
    return [(call.name, json.loads(call.arguments or "{}")) for call in calm.calls] in sent


def parsers_of(rows: Sequence[Row]) -> dict[str, int]:
    """Numbers of parsers, and of kinds of requests, that the deaths have hit."""
    played = [row.asked.played for row in rows]
    return {
        "tool parsers": len({(each.engine, each.tool_parser) for each in played}),
        "reasoning parsers": len({(each.engine, each.reasoning_parser) for each in played}),
        "with both": sum(bool(each.tool_parser and each.reasoning_parser) for each in played),
        "required or named": sum(each.tool_choice in ("required", "named") for each in played),
        "streamed": sum(row.asked.is_stream for row in rows),
        "with a seed": sum(row.asked.is_seeded for row in rows),
    }


def groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of the table: all deaths, those of an engine, those of an API."""
    yield "all", list(rows)
    for engine in ENGINES:
        of = [row for row in rows if row.engine == engine]
        if of:
            yield engine, of
            yield f"{engine}, streamed", [row for row in of if row.asked.is_stream]
            yield f"{engine}, whole", [row for row in of if not row.asked.is_stream]
            yield f"{engine}, greedy", [row for row in of if not row.asked.is_seeded]
            yield f"{engine}, seeded", [row for row in of if row.asked.is_seeded]
    for api in sorted({row.asked.api for row in rows}):
        yield api, [row for row in rows if row.asked.api == api]


def near_ties(rows: Sequence[Row], differ: float) -> dict[str, Any]:
    """Second runs that differed and streams that ended by that, beside what is to be expected.

    A run of `t` known tokens differs with the probability 1 - (1 - p)^t. A stream ends explicitly
    if both the second run and the third one, elsewhere, differ.
    """
    replayed = [row for row in rows if row.replays]
    chances = [1 - (1 - differ) ** row.known_tokens for row in replayed]
    count = max(1, len(replayed))
    known = sorted(row.known_tokens for row in replayed) or [0]
    return {
        "replays": len(replayed),
        "known tokens at the median": known[len(known) // 2],
        "second runs that differed": sum(row.replays[0] == "failed" for row in replayed) / count,
        "predicted": sum(chances) / count,
        "ended explicitly": sum(row.verdict.error is not None for row in replayed) / count,
        "predicted end": sum(each**2 for each in chances) / count,
    }


def table_of(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table()
    for name in ("", "deaths", *(each for each in BARS), "whole", "explicit errors"):
        table.add_column(name, justify="left" if name in ("", "explicit errors") else "right")
    for name, found in figures.items():
        errors = ", ".join(f"{code}: {n}" for code, n in found["explicit errors"].items())
        share = found["whole and equal"] / max(1, found["deaths"])
        table.add_row(
            name, str(found["deaths"]), *(str(found[bar]) for bar in BARS), f"{share:.1%}", errors
        )
    return table


def shown(row: Row) -> dict[str, Any]:
    """One wrong answer, as the result keeps it."""
    return {
        "number": row.number,
        "asked": asdict(row.asked),
        "at_byte": row.at_byte,
        "of_bytes": row.of_bytes,
        "options": row.options,
        "faults": row.verdict.faults,
        "error": row.verdict.error,
    }


def misses(figures: dict[str, dict[str, Any]], differ: float) -> list[str]:
    """The bars that the run misses."""
    found = [f"{figures['all'][bar]} {bar}; bar 0" for bar in BARS if figures["all"][bar]]
    for name in WITH_BAR if not differ else ():
        of = figures.get(name, {})
        if of and of["whole and equal"] / of["deaths"] < WHOLE_BAR:
            found.append(
                f"{name}: {of['whole and equal']} of {of['deaths']} whole; bar {WHOLE_BAR:.0%}"
            )
    return found


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--deaths", type=int, default=None)
    parser.add_argument("--differ", type=float, default=0.0, metavar="P")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DEATHS} deaths")
    options = parser.parse_args()
    count = options.deaths or (QUICK_DEATHS if options.quick else DEATHS)
    record = Record(options.seed, timed=False)
    logging.disable(logging.CRITICAL)  # Each death is a warning.
    deaths = Deaths(options.seed, options.differ)
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        rows = runner.run(deaths.rows(count))
    return keep(options, record, deaths, rows)


def keep(options: argparse.Namespace, record: Record, deaths: Deaths, rows: Sequence[Row]) -> int:
    """Print and keep the figures; return the exit status."""
    console = Console(record=True, width=150)
    figures = {name: counted(row.verdict for row in of) for name, of in groups(rows)}
    console.print(table_of(figures))
    console.print(parsers_of(rows))
    first = Counter(row.options[0] if row.options else "none" for row in rows)
    console.print("first recovery:", dict(first.most_common()))
    document: dict[str, Any] = {
        "deaths": len(rows),
        "differ": options.differ,
        "parsers": parsers_of(rows),
        "groups": figures,
        "first_recovery": first,
    }
    document["fail_without_a_death"] = deaths.failed_calm
    console.print("fail without a death, not counted:", deaths.failed_calm, markup=False)
    if options.differ:
        document["near_ties"] = {
            name: near_ties(of, options.differ)
            | {"learned a token": deaths.learned[engine].chance(1)}
            for name, of in groups(rows)
            for engine in ENGINES
            if name == engine
        }
        console.print("near-ties:", document["near_ties"])
    wrong = [row for row in rows if row.verdict.is_wrong]
    for row in wrong[:10]:
        console.print(f"WRONG {shown(row)}", markup=False)
    document["wrong"] = [shown(row) for row in wrong]
    missed = misses(figures, options.differ)
    console.print("missed:", missed or "nothing", markup=False)
    name = "near_ties" if options.differ else "parsed_deaths"
    record.keep(options.out, name, document, console.export_text())
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
