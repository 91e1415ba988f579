"""The figures as a table, beside the bars they are held against."""

from typing import Any

BARS = {"5": ("p99", 3.0), "64": ("median", 5.0), "1000": ("median", 10.0)}
HOURS = 1000
TRAFFIC_BAR = 20_000

Figures = dict[str, Any]


def as_text(figures: Figures) -> str:
    tables = (_deaths, _hours, _stops, _storms, _traffic)
    return "\n\n".join("\n".join(table(figures)) for table in tables) + "\n"


def misses(figures: Figures) -> list[str]:
    """Bars that what was measured does not hold."""
    deaths = figures["deaths"]["all_s"]
    found = [
        f"deaths at {n} nodes"
        for n, (which, bar_s) in BARS.items()
        if deaths[f"{n} nodes"][which] > bar_s
    ]
    if figures["hours"]["deaths"]:
        found.append("false deaths")
    if figures["stops"]["of_others"]:
        found.append("deaths of others by stops")
    if figures["storms"]["failed"]:
        found.append("storms")
    if any(row["bytes_per_s"] > TRAFFIC_BAR for row in figures["traffic"]):
        found.append("traffic")
    return found


def _deaths(figures: Figures) -> list[str]:
    lines = [
        f"{'death known by all others, s':<40}{'median':>9}{'p99':>9}{'longest':>9}"
        f"{'kills':>7}   bar"
    ]
    for name, found in figures["deaths"]["all_s"].items():
        count = name.split(" ")[0]
        bar = f"{BARS[count][0]} {BARS[count][1]:g}" if name == f"{count} nodes" else ""
        numbers = f"{found['median']:>9.2f}{found['p99']:>9.2f}{found['most']:>9.2f}"
        row = f"{numbers}{found['times']:>7}   {bar}"
        lines.append(f"{name:<40}{row}".rstrip())
    return lines


def _hours(figures: Figures) -> list[str]:
    lines = [
        f"{'no deaths, 64 nodes':<26}{'hours':>8}{'false deaths':>14}{'suspicions':>12}"
        f"{'suspectors':>12}{'nearest':>9}   bar"
    ]
    for found in (figures["hours"], *figures["harder"]):
        label, bar = f"{found['loss']:.0%}", ""
        if found is figures["hours"]:
            label, bar = f"{label} of all packets lost", f"   0 in {HOURS:,} h"
        counts = f"{found['hours']:>8,g}{found['deaths']:>14}{found['suspicions']:>12,}"
        counts += f"{found['most_accusers']:>12}"
        lines.append(f"{label:<26}{counts}{found['nearest']:>9.2f}{bar}")
    return [
        *lines,
        "  nearest: longest time of a suspicion, as a share of the length of an unconfirmed one",
    ]


def _stops(figures: Figures) -> list[str]:
    stops = figures["stops"]
    return [
        f"8 of 64 nodes stop {stops['stops']:,} times for up to 5 s, 30 % loss: "
        f"{stops['of_stopped']} times a stopped one was declared dead, "
        f"{stops['of_others']} times another (bar 0)"
    ]


def _storms(figures: Figures) -> list[str]:
    storms = figures["storms"]
    faults = ", ".join(f"{count:,} {name}" for name, count in storms["faults"].items())
    return [
        f"{storms['seeds']:,} storms over 2 to 10 nodes: after {len(storms['failed'])} "
        f"of them not all agreed (bar 0)",
        f"  {storms['hours']:,.0f} simulated hours, {storms['packets']:,} packets; {faults}",
    ]


def _traffic(figures: Figures) -> list[str]:
    lines = [
        f"{'sent per node, 64 nodes':<40}{'kB/s':>9}{'packets/s':>11}"
        f"{'age of load, s: median':>24}{'p99':>7}   bar"
    ]
    for row in figures["traffic"]:
        label = (
            f"loss {row['loss']:.0%}, "
            f"{'load every second' if row['publishing'] else 'nothing published'}"
        )
        ages = (
            f"{row['age_s_median']:>24.2f}{row['age_s_p99']:>7.2f}"
            if row["publishing"]
            else f"{'':>31}"
        )
        sent = f"{row['bytes_per_s'] / 1e3:>9.2f}{row['packets_per_s']:>11.1f}"
        lines.append(f"{label:<40}{sent}{ages}   {TRAFFIC_BAR // 1000}")
    return lines
