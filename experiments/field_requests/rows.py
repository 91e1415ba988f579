"""A part's figures, beside its bars."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.field_requests.cluster import Cluster


@dataclass
class Row:
    """The figures of one part; `missed` names each bar that they miss."""

    part: str
    wanted: int = 0  # Requests.
    answered: int = 0  # As without a proxy: whole, each token once.
    computed: int = 0  # The most often that one history was computed.
    calls: int = 0  # The most engine calls of one request.
    failed_attempts: int = 0
    deaths: int = 0  # Servers that the proxy lost.
    ejections: int = 0  # Servers that were once not in use, though they ran.
    seconds: float = 0.0
    bars: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def bar(self, name: str, *, is_met: bool) -> None:
        """Add a bar."""
        self.bars.append(name)
        if not is_met:
            self.missed.append(name)

    def all_answered(self) -> None:
        """Add the bar of every part."""
        self.bar(f"all {self.wanted} answered", is_met=self.answered == self.wanted)

    async def take(self, system: Cluster, *killed: str) -> None:
        """Take what the proxy and the servers have counted; `killed` had to be suspected."""
        self.computed, self.calls = system.seen.most_computed(), system.seen.most_calls()
        self.failed_attempts = await system.count("kvrs_attempts_failed_total")
        self.deaths = await system.count("kvrs_worker_deaths_total")
        recoveries = (await system.state())["recoveries"]
        self.more["causes"] = dict(Counter(each["cause"] for each in recoveries))
        suspected = sorted(each for each in system.suspected if each.split()[0] not in killed)
        self.ejections = len({each.split()[0] for each in suspected})
        if suspected:
            self.more["suspected"] = suspected
        violations = sorted(set(system.servers["p0"].script.violations))
        if violations:
            self.notes.append(f"violations: {violations}")

    def note_causes(self) -> None:
        """Say why streams were recovered."""
        self.notes += [
            f"recovered {count}: {cause}" for cause, count in self.more["causes"].items()
        ]

    def as_figures(self) -> dict[str, Any]:
        return asdict(self) | {"is_met": not self.missed}


def as_text(rows: list[Row]) -> str:
    """A line for each part, its bars below it."""
    heads = ("wanted", "answered", "computed", "calls", "failed", "deaths", "ejected", "s")
    lines = [f"{'part':<14}" + "".join(f"{each:>10}" for each in heads)]
    for row in rows:
        counts = (row.wanted, row.answered, row.computed, row.calls)
        after = (row.failed_attempts, row.deaths, row.ejections)
        figures = "".join(f"{each:>10,}" for each in (*counts, *after))
        lines.append(f"{row.part:<14}{figures}{row.seconds:>10.1f}")
        lines += [f"    bar: {bar}" for bar in row.bars if bar not in row.missed]
        lines += [f"    bar: {bar}: MISSED" for bar in row.missed]
        lines += [f"    {note}" for note in row.notes]
    return "\n".join(lines)
