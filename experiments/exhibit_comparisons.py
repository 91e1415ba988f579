"""Figures of ours beside published ones as ratios, for the verdicts of docs/evidence.md.

Ours comes out of the kept results; the published figures stand here, as in the rows.
"""

from collections.abc import Mapping

from experiments import exhibit_figures as figures
from experiments.exhibit_figures import FIXED, PROGRESSIVE, SCHEDULED, STOP, WHOLE
from experiments.kept import kept
from experiments.pipelines import table1
from experiments.verdicts import Compared, change

_WINDOW_KEYS = {
    "window_s": "window",
    "window_ttft_s": "TTFT",
    "window_tpot_s": "TPOT",
    "hit_tpot_s": "TPOT of the interrupted",
}
_QUARTERS = ("4x1", "8x2", "16x4", "32x8", "64x16")


def impact() -> list[Compared]:
    """TTFT and time per token in the window, over those without a failure."""
    published = {"window_ttft_s": 4.0, "window_tpot_s": 1.6}
    return [
        _ratio(f"{_WINDOW_KEYS[key]} at {case}", value, rows, key, key.replace("_", "_clean_", 1))
        for case in _QUARTERS
        if (rows := figures.rows_at_paper(case).get(STOP))
        for key, value in published.items()
    ]


def causes() -> list[Compared]:
    """The share of the wait that is queueing, and how many times as long replays take as the wait
    of requests that were not interrupted.
    """
    replays = {
        "4x1": 25.6 / 4.1,
        "8x2": 24.0 / 3.8,
        "16x4": 27.1 / 3.5,
        "32x8": 29.4 / 3.5,
        "64x16": 27.8 / 3.6,
    }
    found = []
    for case, replay in replays.items():
        if rows := figures.rows_at_paper(case).get(STOP):
            share = figures.mean_of([row["queue_share"] for row in rows.values()])
            name = f"share of queueing at {case}"
            found += [
                Compared(name, 0.79, share.mean, share.half_width, nothing=0.0),
                _ratio(f"replay at {case}", replay, rows, "replay_ttft_s", "ttft_s"),
            ]
    return found


def _ratio(
    what: str, published: float, rows: Mapping[str, Mapping[str, float]], key: str, base: str
) -> Compared:
    """Mean over the seeds of one figure over another."""
    found = figures.mean_of([row[key] / row[base] for row in rows.values()])
    return Compared(what, published, found.mean, found.half_width)


def _of_case(case: str, key: str, published: float, base: str = STOP) -> Compared:
    against = " against fixed" if base == FIXED else ""
    what = {"window_s": "window", "ttft_s": "TTFT", "tpot_s": "TPOT"}[key]
    return change(f"{what} at {case}{against}", published, figures.by_seed(case, key, base))


def _ttft(**published: float) -> list[Compared]:
    """Cases such as `at_8x1`, those that are kept."""
    return [
        _of_case(case, "ttft_s", each)
        for name, each in published.items()
        if figures.simulated(case := name.removeprefix("at_"))
    ]


def four_workers() -> list[Compared]:
    return [
        _of_case("4x1", "window_s", -0.5),
        _of_case("4x1", "window_s", -0.349, FIXED),
        _of_case("4x1", "ttft_s", -0.444),
    ]


def eight_workers() -> list[Compared]:
    return [
        _of_case("8x1", "window_s", 29.9 / 83.3 - 1),
        _of_case("8x1", "window_s", 29.9 / 82.8 - 1, FIXED),
        _of_case("8x1", "ttft_s", -0.296),
    ]


def scheduling() -> list[Compared]:
    return [
        _of_case(case, key, published)
        for case in ("4x1", "8x1")
        for key, published in (("ttft_s", -0.191), ("tpot_s", 96.7 / 99.3 - 1))
    ]


def with_drafts() -> list[Compared]:
    published = {
        ("LUMEN", "ttft_s"): -0.444,
        ("LUMEN", "tpot_s"): -0.159,
        ("LUMEN", "window_s"): -0.5,
        ("+ progressive", "tpot_s"): 95.8 / 99.3 - 1,
    }
    return [
        change(f"{scheme} {key}", value, figures.changed_with_drafts("4x1", scheme, key))
        for (scheme, key), value in published.items()
    ]


def request_rates() -> list[Compared]:
    return [_of_case(case, "ttft_s", -0.333) for case in ("4x1:5.5", "4x1", "4x1:7.5")]


def failures_of_eight() -> list[Compared]:
    return _ttft(at_8x1=-0.296, at_8x2=-0.508, at_8x4=-0.827)


def table_3() -> list[Compared]:
    published = {
        (WHOLE, "window_s"): 81.5 / 100.3 - 1,
        (WHOLE, "window_ttft_s"): -0.122,
        (WHOLE, "window_tpot_s"): -0.226,
        (SCHEDULED, "window_ttft_s"): -0.063,
        (SCHEDULED, "window_tpot_s"): -0.062,
        (PROGRESSIVE, "window_tpot_s"): -0.184,
    }
    return [
        change(f"{_WINDOW_KEYS[key]} of {scheme}", value, figures.changed_at_paper(scheme, key))
        for (scheme, key), value in published.items()
    ]


def _at_paper(published: Mapping[tuple[str, str, str], float]) -> list[Compared]:
    """LUMEN's changes by case, figure and what they are against, in the cases that are kept."""
    return [
        change(
            f"{_WINDOW_KEYS[key]} at {case}" + (" against fixed" if base == FIXED else ""),
            value,
            figures.changed_at_paper(WHOLE, key, case, base),
        )
        for (case, key, base), value in published.items()
        if figures.rows_at_paper(case)
    ]


def rates() -> list[Compared]:
    shown = {"10x1:1.2": -0.053, "10x1": -0.122, "10x1:1.7": -0.427}
    return _at_paper({(case, "window_ttft_s", STOP): each for case, each in shown.items()})


def failures_of_ten() -> list[Compared]:
    return _at_paper(
        {
            ("10x5", "window_ttft_s", STOP): -0.636,
            ("10x5", "window_ttft_s", FIXED): -0.339,
            ("10x5", "window_tpot_s", STOP): -0.315,
            ("10x5", "window_tpot_s", FIXED): -0.230,
            ("10x5", "window_s", STOP): -0.469,
            ("10x5", "window_s", FIXED): -0.333,
        }
    )


def a_quarter() -> list[Compared]:
    """The least of the published changes at 4 to 64 workers."""
    least = {"window_ttft_s": -0.468, "window_tpot_s": -0.307, "window_s": -0.436}
    return _at_paper({(case, key, STOP): each for case in _QUARTERS for key, each in least.items()})


def one_failure() -> list[Compared]:
    """Changes at 4 and 64 workers, and of the time per token of interrupted requests at each."""
    window = {
        ("4x1", "window_ttft_s", STOP): -0.506,
        ("64x1", "window_ttft_s", STOP): -0.013,
        ("4x1", "window_tpot_s", STOP): -0.372,
        ("64x1", "window_tpot_s", STOP): -0.037,
    }
    hit = {
        "4x1": 116.5 / 357.7,
        "8x1": 79.6 / 236.1,
        "16x1": 76.4 / 177.7,
        "32x1": 60.0 / 150.0,
        "64x1": 69.6 / 147.6,
    }
    return _at_paper(window | {(case, "hit_tpot_s", STOP): at - 1 for case, at in hit.items()})


def co_failure() -> list[Compared]:
    found = kept(figures.PLACEMENT)["co_failure"]["load"]
    return [Compared("share of checkpoints", 0.238, found, nothing=None)]


def table_1() -> list[Compared]:
    """How many times as long requests take without a borrowed stage."""
    published = table1.published()
    return [
        Compared(
            f"{text} in scene {row[0]} at {row[1]:g}/s",
            published[row][f"base_{key}"] / published[row][f"ours_{key}"],
            base[key] / ours[key],
        )
        for key, text in (("ttft_s", "TTFT"), ("latency_s", "latency"))
        for row, (base, ours) in figures.named_rows().items()
    ]


def replication() -> list[Compared]:
    found = kept(figures.REPLICATION)["latency"]
    return [
        Compared(
            f"latency {key}",
            1 + change,
            1 + found[key]["change"],
            (found[key]["interval"][1] - found[key]["interval"][0]) / 2,
        )
        for key, change in (("mean", 0.023), ("p99", 0.028))
    ]
