"""Streams at two pipelines while hosts, donors and processes of instances die, beside the same
requests undisturbed.

    python -m experiments.pipelines.series [--streams 500] [--kills 8] [--group] [--ring]

The kinds of death: the host of a stage; two hosts of a pipeline at once; the process of an
instance; a host, and another one while the first is replaced; a host, and that of the same stage of
the other pipeline, which is the donor where there is a group (`--group`).
"""

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop

from experiments.command_line import parser_of
from experiments.pipelines.two import (
    Death,
    Pipelines,
    Row,
    config_of,
    deaths_of,
    donors_of,
    end,
    is_whole,
    longest_gap_s,
    parts_of,
    requests_of,
    serves,
)
from experiments.record import Record
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import replay
from kvrs_lab.report.report import build_report
from kvrs_lab.traces.records import ReplayRequest, StreamRecord

STAGES, TOKENS, PER_S = 3, (100, 400), 2.5
WHOLE_S, SOON_S, STREAM_S = 90.0, 5.0, 120.0
MAX_CAUSES = 8
WRONG = ("errors", "tokens_lost", "tokens_repeated", "tokens_different", "text_different")
STAYS = ("in_place", "substitute")


class Deaths:
    """Carries them out, and notes what became of each; moments count from `start_s`."""

    def __init__(self, own: Pipelines, start_s: float) -> None:
        self._own, self._start_s = own, start_s
        self.rows: list[Row] = []

    async def carry_out(self, deaths: Sequence[Death]) -> None:
        for death in deaths:
            await self._whole()
            await asyncio.sleep(death.after_s)
            self.rows.append(await self._one(death))
            print(f"  {as_line(self.rows[-1])}", flush=True)
        await self._whole()

    async def _whole(self) -> dict[str, Row]:
        rows = await self._own.until(
            lambda rows: all(is_whole(row, STAGES) for row in rows.values()), WHOLE_S
        )
        if rows is None:
            raise RuntimeError(f"a pipeline is not whole after {WHOLE_S:g} s")
        return rows

    async def _one(self, death: Death) -> Row:
        name, other = f"d{death.pipeline}", f"d{1 - death.pipeline}"
        before = await self._whole()
        streams = await self._own.streams_at(name)
        known = len(await self._own.recoveries())
        killed_s, began_s = time.monotonic() - self._start_s, time.monotonic()
        dead = await self._kill(death, before, name, other)
        names, lost = {name, *(at for at, _ in dead)}, _marks(before, dead)
        after = await self._own.until(
            lambda rows: serves(rows[name], STAGES) and not _shows(rows[name], lost), WHOLE_S
        )
        serves_s = time.monotonic() - began_s
        whole = await self._own.until(
            lambda rows: (
                all(is_whole(rows[each], STAGES) for each in names)
                and not any(_shows(rows[each], lost) for each in names)
            ),
            WHOLE_S,
        )
        recovered = (await self._own.recoveries())[known:]
        return {
            "kind": death.kind,
            "victim": name,
            "killed_s": killed_s,
            "serves_s": None if after is None else serves_s,
            "whole_s": None if whole is None else time.monotonic() - began_s,
            "streams": streams,
            "changed": changed(before, whole or {}, dead),
            **kept(streams, recovered, name),
        }

    async def _kill(
        self, death: Death, before: Mapping[str, Row], name: str, other: str
    ) -> list[tuple[str, int | None]]:
        """The victims as instance and stage; no stage: its own process."""
        if death.kind == "head":
            end(before[name]["pid"])
            return [(name, None)]
        dead: list[tuple[str, int | None]] = [(name, death.stage)]
        end(_host_of(before, name, death.stage))
        if death.kind == "two hosts":
            end(_host_of(before, name, death.other))
            dead.append((name, death.other))
        elif death.kind == "mid-join":
            await self._own.until(lambda rows: rows[name]["state"] == "reforming", SOON_S)
            await asyncio.sleep(death.later_s)
            end(_host_of(before, name, death.other))
            dead.append((name, death.other))
        elif death.kind == "donor":
            await self._own.until(
                lambda rows: any(donors_of(rows[name])) or rows[name]["state"] == "reforming",
                SOON_S,
            )
            await asyncio.sleep(death.later_s)
            end(_host_of(before, other, death.stage))
            dead.append((other, death.stage))
        return dead


def _host_of(rows: Mapping[str, Row], name: str, stage: int) -> int:
    return int(rows[name]["stages"][stage]["host_pid"])


def _marks(rows: Mapping[str, Row], dead: Sequence[tuple[str, int | None]]) -> set[int]:
    """Ids of the processes that were killed."""
    return {
        int(rows[name]["pid"]) if stage is None else _host_of(rows, name, stage)
        for name, stage in dead
    }


def _shows(row: Row, pids: set[int]) -> bool:
    """The row is of before the death."""
    return row["pid"] in pids or any(stage["host_pid"] in pids for stage in row["stages"])


def changed(
    before: Mapping[str, Row],
    after: Mapping[str, Row],
    dead: Sequence[tuple[str, int | None]],
) -> list[str]:
    """Hosts that were not killed and are other processes, or have read weights again."""
    then, now = parts_of(before), parts_of(after)
    killed = {f"{name}-stage-{stage}" for name, stage in dead if stage is not None}
    return sorted(name for name in then.keys() - killed if now.get(name) != then[name])


def kept(streams: Mapping[str, int], recovered: Sequence[Row], name: str) -> Row:
    """The streams of the victim that stayed there and that left; of the former those whose attempt
    is not the one that they had.
    """
    first = {row["stream"]: row for row in reversed(recovered) if row["stream"] in streams}
    stayed = {
        stream: row
        for stream, row in first.items()
        if row["option"] in STAYS and row["to"] == name and row["outcome"] == "resumed"
    }
    return {
        "stayed": sorted(stayed),
        "left": sorted(first.keys() - stayed.keys()),
        "attempts_changed": sum(row["attempt"] != streams[at] for at, row in stayed.items()),
        "options": dict(Counter(row["option"] for row in first.values())),
    }


def with_gaps(death: Row, records: Sequence[StreamRecord]) -> Row:
    """The death with the longest gaps of streams that stayed, that left, and that were at the other
    pipeline, in the time until the victim was whole.
    """
    from_s = death["killed_s"]
    to_s = from_s + (death["whole_s"] or WHOLE_S)
    gaps = {
        record.stream: longest_gap_s(record.token_times_s, from_s, to_s)
        for record in records
        if record.token_times_s and record.token_times_s[-1] > from_s
    }
    here, moved = set(death["stayed"]), set(death["left"])
    others = gaps.keys() - set(death["streams"])
    groups = {"stayed": here, "left": moved, "others": others}
    found = {f"gap_{what}_s": _most(gaps, of) for what, of in groups.items()}
    counts = {"streams": len(death["streams"]), "stayed": len(here), "left": len(moved)}
    return {key: value for key, value in death.items() if key != "killed_s"} | counts | found


def _most(gaps: Mapping[str, float], streams: set[str]) -> float | None:
    return max((gaps[stream] for stream in streams if stream in gaps), default=None)


async def measure(options: argparse.Namespace, cluster: Cluster) -> Row:
    requests = requests_of(options.streams, options.rate, TOKENS, options.seed)
    deaths = deaths_of(options.kills, STAGES, options.seed)
    async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
        own = Pipelines(port)
        print("  the same requests undisturbed", flush=True)
        calm = await run(cluster.url, port, requests, time.monotonic())
        print("  with deaths", flush=True)
        start_s = time.monotonic()
        killing = Deaths(own, start_s)
        load = asyncio.create_task(run(cluster.url, port, requests, start_s))
        killer = asyncio.create_task(killing.carry_out(deaths))
        try:
            records = await load
            # A death without streams shows nothing.
            late = not killer.done()
        finally:
            for task in (load, killer):
                task.cancel()
            await asyncio.gather(load, killer, return_exceptions=True)
        report = build_report(records, calm, [], [], {})
    if killer.done() and not killer.cancelled() and (error := killer.exception()) is not None:
        raise error
    return {
        "streams": options.streams,
        "kills_left": options.kills - len(killing.rows) if late else 0,
        **{key: report[key] for key in (*WRONG, "exact")},
        "causes": causes_of(records),
        "deaths": [with_gaps(each, records) for each in killing.rows],
    }


def causes_of(records: Sequence[StreamRecord]) -> dict[str, int]:
    """Why streams failed, and whether before their first token."""
    found = Counter[str]()
    for record in records:
        if (error := record.error) is not None:
            when = "after tokens" if record.token_times_s else "without a token"
            found[f"{when}: {error.kind.value}: {error.message}"] += 1
    return dict(found.most_common(MAX_CAUSES))


async def run(
    url: str, port: AdminPort, requests: Sequence[ReplayRequest], start_s: float
) -> list[StreamRecord]:
    await port.reset_caches()
    return await replay(url, requests, start_s=start_s, timeout_s=STREAM_S)


def as_line(row: Mapping[str, Any]) -> str:
    streams, stayed, left = (
        each if isinstance(each, int) else len(each)
        for each in (row["streams"], row["stayed"], row["left"])
    )
    gaps = "".join(
        f"{'-' if (gap := row.get(f'gap_{what}_s')) is None else f'{gap * 1e3:.0f}':>8}"
        for what in ("stayed", "left", "others")
        if f"gap_{what}_s" in row
    )
    return (
        f"{row['kind']:10}{_seconds(row['serves_s']):>9}{_seconds(row['whole_s']):>8}{streams:9}"
        f"{stayed:8}{left:6}{gaps}"
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def missed(figures: Row) -> list[str]:
    """The bars that are missed."""
    deaths = figures["deaths"]
    found = [f"{figures[key]} {key.replace('_', ' ')}" for key in WRONG if figures[key]]
    if figures["kills_left"]:
        found.append(f"{figures['kills_left']} deaths never came")
    found += [f"{row['kind']}: never whole" for row in deaths if row["whole_s"] is None]
    if again := sum(row["attempts_changed"] for row in deaths):
        found.append(f"{again} streams stayed in another attempt")
    return found + [
        f"{row['kind']}: {', '.join(row['changed'])} changed" for row in deaths if row["changed"]
    ]


def as_text(figures: Row, way: str) -> str:
    deaths = figures["deaths"]
    heads = ("serves s", "whole s", "streams", "stayed", "left", "stay", "leave", "others")
    widths = (9, 8, 9, 8, 6, 8, 8, 8)
    titles = "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    wrong = " / ".join(str(figures[key]) for key in WRONG)
    lines = [
        f"deaths at two pipelines, {way}; the last three columns: longest gaps in ms",
        f"{'':10}{titles}",
        *map(as_line, deaths),
        f"{figures['streams']} streams: {wrong} errors / tokens lost / repeated / different / "
        f"texts different",
    ]
    if again := [row["serves_s"] for row in deaths if row["serves_s"] is not None]:
        lines.append(f"an instance serves again after {statistics.median(again):.2f} s (median)")
    lines += [f"  {count}: {cause}" for cause, count in figures["causes"].items()]
    faults = missed(figures)
    return "\n".join([*lines, *(f"MISSED: {each}" for each in faults or ())]) + (
        "\n" if faults else "\nPASSED\n"
    )


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--rate", type=float, default=PER_S, help="requests/s")
    parser.add_argument("--group", action="store_true", help="they lend each other stages")
    parser.add_argument(
        "--ring", action="store_true", help="with a group: and keep replicas of each other's pages"
    )
    options = parser.parse_args()
    record = Record(options.seed)
    config = config_of(STAGES, group=options.group, ring=options.ring, seed=options.seed)
    with Cluster(config, lambda line: print(f"  {line}", flush=True)) as cluster:
        figures = uvloop.run(measure(options, cluster))
    name, way = ("series", "substitute") if options.group else ("series-wait", "wait")
    if options.ring:
        name, way = "series-ring", "substitute, with replicas"
    text = as_text(figures, way)
    print(text, end="")
    record.keep(options.out, name, figures, text)
    return 1 if missed(figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
