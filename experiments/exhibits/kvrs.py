"""KVRS (RecompOrMigrate): its figures beside ours."""

import statistics
from collections.abc import Callable
from functools import partial

from experiments.exhibits.figures import half_widths, mean_of, value
from experiments.kept import Results
from experiments.panels import Kind, Panel, Series
from experiments.verdicts import Claim, Compared, change
from kvrs.profiles import catalog

SKEW, SKEW_DISTSERVE = "load_skew/results/rates.json", "load_skew/results/distserve_rates.json"
SKEW_SIMULATED = "load_skew/results/simulated.json"
SKEW_PAIRS = "load_skew/results/one_rate.json"
HAND_OFF, HAND_OFF_DISTSERVE = (
    f"crossover/results/{name}.json" for name in ("hand_off", "hand_off_distserve")
)
DECISION = "request_path/results/decision.json"
LINK = "link_monitor/results/simulated.json"
PROFILE = "opt-13b-a100-distserve-tp1"
# Bars of our own.
MOST_REGRET, MOST_PROBES, MOST_ADDED_MS = 0.1, 0.01, 0.3

_published = partial(value, "kvrs")


def queue_depth(tokens: float, gbit_per_s: float) -> float:
    """The paper's q*: requests whose service takes as long as the transfer."""
    source = "Figure: crossover validation"
    service_s = _published(source=source, what="time of a request in s")
    of_token_bytes = catalog.kv_geometry(PROFILE).bytes_per_token
    return tokens * of_token_bytes / (gbit_per_s / 8 * 1e9) / service_s


def crossover_map(_: Results) -> list[Compared]:
    most = _published(source="Figure: crossover queue depth", what="greatest queue depth")
    depth = queue_depth(16_384, 1)
    return [Compared("greatest q*", most, depth, claim=Claim.AT_LEAST, form="requests")]


def hand_off(path: str, results: Results) -> list[Compared]:
    """By the product's prediction, which has the hand-shake, the transfer within the node and the
    first step, with the measured time of a request as in the paper. A result from before it was
    computed is judged by the bare formula.
    """
    most = _published(source="Figure: crossover validation", what="most off the formula")
    found = results(path)
    is_predicted = "worst_off_predicted" in found
    off = abs(found["worst_off_predicted" if is_predicted else "worst_off_measured"])
    what = "crossing off the prediction" if is_predicted else "crossing off the formula"
    return [Compared(what, most, off, nothing=None, claim=Claim.AT_MOST, form="share")]


def skew(path: str, results: Results) -> list[Compared]:
    gained = _published(source="Figure: goodput under skew", what="goodput at 90 % skew")
    return [
        change(f"goodput at {rate}/s", gained, mean_of(_gains(ways)))
        for rate, ways in results(path)["rows"].items()
        if ways["rom"]
    ]


def _gains(ways: dict[str, list[dict[str, float]]]) -> list[float]:
    pairs = zip(ways["own_pair"], ways["rom"], strict=False)
    return [rom["goodput_per_s"] / own["goodput_per_s"] - 1 for own, rom in pairs]


def cells(path: str, results: Results) -> list[Compared]:
    found = results(path)
    of = found["cells_clear"]
    return [
        Compared(f"cells in which {name} is right", 1.0, right / of, nothing=None, form="share")
        for name, right in found["right_by_policy"].items()
    ]


def computed(results: Results) -> list[Compared]:
    found = results("link_monitor/results/computed.json")
    return [
        Compared(
            "time over the better way of each",
            *(None, found["regret"], found["half_width"], None, Claim.AT_MOST),
            bar=MOST_REGRET,
            form="share",
        )
    ]


def link(results: Results) -> list[Compared]:
    rows = [row for row in results(LINK)["rows"] if row["rule"] == "kvrs"]
    shown = {
        "time over decisions that know the rate": (
            statistics.fmean(row["regret"] for row in rows),
            MOST_REGRET,
        ),
        "probes of the link": (max(row["probe_share"] for row in rows), MOST_PROBES),
    }
    return [
        Compared(what, None, ours, None, None, Claim.AT_MOST, bar=bar, form="share")
        for what, (ours, bar) in shown.items()
    ]


def decision(results: Results) -> list[Compared]:
    """A linear decision would take as many times as long as the history is."""
    rows = results(DECISION)["decision_us"][PROFILE]
    grows = _published(source="O(1) decision", what="growth of the time of a decision")
    return [
        Compared(
            f"time of `{name}`, 100,000 over 512 tokens",
            grows,
            rows[name]["100000"]["median"] / rows[name]["512"]["median"],
            nothing=100_000 / 512,
            form="times",
        )
        for name in ("rom", "auto")
    ]


def slots(results: Results) -> list[Compared]:
    most = _published(source="Reservation", what="migrations at once")
    held = results("two_proxies/results/two_proxies.json")["most_held_seen"]
    return [Compared("migrations", most, held, None, None, Claim.AT_MOST, form="at once")]


def healthy(results: Results) -> list[Compared]:
    added = results("healthy_path/results/healthy_path.json")["figures"]["added"]
    ours = added["latency_ms_p50"]
    what = "added to a token, p50"
    return [Compared(what, None, ours, None, None, Claim.AT_MOST, bar=MOST_ADDED_MS, form="ms")]


# At the rate at which the baseline loses about as much as the paper's.
headline = partial(skew, SKEW_PAIRS)
COMPARED: dict[str, Callable[[Results], list[Compared]]] = {
    "Figure: crossover queue depth": crossover_map,
    "Figure: crossover validation": partial(hand_off, HAND_OFF),
    "Figure: crossover validation, on DistServe": partial(hand_off, HAND_OFF_DISTSERVE),
    "Figure: goodput under skew": partial(skew, SKEW),
    "Figure: goodput under skew, 20 pairs": partial(skew, SKEW_PAIRS),
    "Figure: goodput under skew, on DistServe": partial(skew, SKEW_DISTSERVE),
    "Figure: goodput under skew, in virtual time": partial(skew, SKEW_SIMULATED),
    "Migrate or recompute": partial(cells, "crossover/results/crossover.json"),
    "Migrate or recompute, on DistServe": partial(cells, "crossover/results/distserve.json"),
    "Migrate or recompute, nothing paced": computed,
    "Bandwidth monitor": link,
    "O(1) decision": decision,
    "At most 32 concurrent migrations": slots,
    "Healthy path as without it": healthy,
}


def _crossing(path: str, engine: str, results: Results) -> list[Panel]:
    """The wait at the own node and at the other one, at the case nearest to the paper's."""
    source = "Figure: crossover validation"
    service_s = _published(source=source, what="time of a request in s")
    other_s = _published(source=source, what="transfer of 1.21 GB at 25 Gbit/s in s")
    rows = {(row["tokens"], row["gbit_per_s"]): row for row in results(path)["rows"]}
    row = rows[1475, 25.0]
    depths = sorted(map(int, row["own_s"]))
    own = [mean_of(row["own_s"][str(depth)]) for depth in depths]
    other = mean_of(row["remote_s"])
    ends = [depths[0], depths[-1]]
    line, flat = Kind.DASHED, Kind.DASHED
    panel = Panel(
        f"Hand-off crossing, {engine}",
        "requests that wait at the own node",
        "time to the next token (ms)",
        [
            Series(
                "published: own node", ends, [1e3 * service_s * x for x in ends], None, True, line
            ),
            Series("published: other node", ends, [1e3 * other_s] * 2, None, True, flat),
            Series(
                "ours: own node",
                depths,
                [1e3 * each.mean for each in own],
                [1e3 * half for half in half_widths(own) or [0.0] * len(own)],
            ),
            Series(
                "ours: other node",
                ends,
                [1e3 * other.mean] * 2,
                [1e3 * (other.half_width or 0.0)] * 2,
            ),
        ],
    )
    return [panel]


def _skew(results: Results) -> list[Panel]:
    gained = _published(source="Figure: goodput under skew", what="goodput at 90 % skew")
    ours = []
    engines = {
        SKEW: "embedded engine",
        SKEW_PAIRS: "embedded, 20 pairs",
        SKEW_DISTSERVE: "DistServe",
        SKEW_SIMULATED: "virtual time",
    }
    for path, engine in engines.items():
        if results.has(path):
            rows = results(path)["rows"]
            found = [mean_of(_gains(ways)) for ways in rows.values()]
            gains = [100 * each.mean for each in found]
            halves = [100 * (each.half_width or 0.0) for each in found]
            ours.append(Series(f"ours: {engine}", [float(rate) for rate in rows], gains, halves))
    rates = [rate for each in ours for rate in each.x]
    ends = [min(rates), max(rates)]
    published = Series("published: gain", ends, [100 * gained] * 2, None, True, Kind.DASHED)
    title, unit = "Goodput, 90 % of the load at one node", "goodput over own pair (%)"
    return [Panel(title, "requests/s", unit, [published, *ours])]


# Figure 2 of the page of the paper, and its goodput under skew.
PANELS = (
    partial(_crossing, HAND_OFF, "embedded engine"),
    partial(_crossing, HAND_OFF_DISTSERVE, "DistServe"),
    _skew,
)
