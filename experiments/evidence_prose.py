"""Prose of docs/evidence.md below its tables. Figures in it come out of the kept results."""

import textwrap
from statistics import fmean

from experiments import exhibit_figures as figures
from experiments.kept import EXPERIMENTS, figure_at, kept, misses

WIDTH = 100
_BACKUP = "measured_once/results/distserve_backup.json"


def differences() -> str:
    return "\n\n".join(
        [
            "## Mechanisms that differ from the papers",
            "Not built:",
            _list(*_NOT_BUILT),
            "By intention:",
            _list(*_BY_INTENTION),
            _wrapped(
                "In experiments marked `paced` the engines sleep the times of a profile. They show "
                "that overheads are small and that decisions are carried out; only those without "
                "pace show that a prediction is right."
            ),
        ]
    )


_NOT_BUILT = (
    "AnchorTP, experts: copies are not weighed against the speed of single ranks, and an instance "
    "with hosts of stages makes none.",
    "KevlarFlow, its ring in the simulator: replicas are whole pages at the next instance there; "
    "the engine sends the part of each stage from host to host.",
    "All of them: no figure of these tables is of a GPU.",
)

_BY_INTENTION = (
    "KVRS, bandwidth: decisions take the lower bound of the estimate, not the moving average "
    "itself ([0024](decisions/0024-link-estimates-are-lower-bounds.md)).",
    "KVRS, target: its best remote node is the one that `policy.dispatch` names, by streams, "
    "because the costs of `rom` cannot tell targets apart.",
    "KVRS, 32 slots: for recoveries. A hand-off takes none, so that no new request waits for one.",
    "KVRS, ABORT: off unless `slo.abort` is set, as in `kvrs up --preset kvrs`.",
    "KVRS on DistServe: one call prefills and decodes. `policy.handoff` is weighed when a stream "
    "begins, not when its prefill is done: one that is to decode elsewhere gets two calls, and is "
    "weighed again between them.",
    "KVRS and LUMEN, each victim for itself: `auto` counts what a choice costs the other victims "
    "([0059](decisions/0059-victims-of-one-event-spare-their-target.md)); `rom` and the fixed "
    "policies do not.",
    "KVRS, gossiped queue lengths: shown, not decided on. Decisions take what instances report to "
    "the proxy every 0.25 s, which is newer than gossip by seconds ([gossip.md](guide/gossip.md)).",
    "LUMEN, queueing delay: the predicted wait of work that comes now, not the mean of past waits. "
    "For a decode instance with free places it is 0, so that pressure alone decides there.",
    "LUMEN, restore pressure: a footprint is what the request may come to, not the longest context "
    "of the model. Agents that are nearly as good share checkpoints out, since a mean does not "
    "grow with their number.",
    "LUMEN, holder: chosen when an attempt starts, and again when its hand-off goes elsewhere.",
    "LUMEN, rebalancing: then `auto` may leave the assigned target "
    "([0015](decisions/0015-dispatch-before-costs.md)). The loads are the streams of this proxy, "
    "and what the last load report counts beyond them: those of other proxies.",
    "LUMEN, three queues: it leaves their shares open; ours are 8 to 4 to 1.",
    "LUMEN, drafts: nothing waits for them, and one that begins before the end of its stream is "
    "used from there ([0066](decisions/0066-drafts-are-verified-not-believed.md)).",
    "LUMEN, reload from SSD: engines of the simulator are back after a time that is given to them; "
    "with draft models it is that of the weights at 2 GB/s.",
    "KevlarFlow, substitution: whether a stage is lent is weighed (`elastic.least_gain`), and each "
    "stream stays or leaves by what is predicted; rows go through the process of the instance.",
    "RaidServe and AnchorTP, timings of ranks: layouts, plans and bytes are checked, seconds on "
    "GPUs are not.",
)


def weaker() -> str:
    """The limits of the exhibits."""
    recovered = kept(figures.ANCHORTP_RECOVERY)["rows"]
    restart, restored = (
        [loss["tfs_s"] for loss in recovered[name]["losses"]]
        for name in ("restart and reload", "in place, KV restored")
    )
    shares = " and ".join(
        f"{ours / theirs:.2f}" for ours, theirs in zip(restored, restart, strict=True)
    )
    window = figures.percent(figures.by_seed("4x1", "window_s"))
    ttft_s = figures.means("8x1", figures.STOP, "ttft_s")
    most = max(
        int(case.partition("x")[0])
        for path in (figures.SIMULATED, figures.SIMULATED_TEN)
        for case in kept(path)["cases"]
    )
    return "\n\n".join(
        [
            "## Exhibits that are missing or weaker",
            _list(
                "LUMEN: its columns with draft models, of which one row has simulated figures; on "
                "processes there is a run of one seed ([lumen](../experiments/lumen)). More than "
                f"{most} instances, where the paper goes to 64; three of five rates and three of "
                "five failure counts of figures 10 and 11.",
                f"LUMEN, where ours shows no difference (the window at 4x1, {window}): at 6.5 "
                "requests a second for each instance the survivors are not saturated, which "
                f"uninterrupted requests show (TTFT {ttft_s:.2f} s at 8x1 where the paper has 3.5 "
                "to 4.1 s), so the window is little more than the reload. The model and its reload "
                "are others, too: the paper has Llama-3-70B on four A100, weights from SSD at "
                "2 GB/s, and the trace Splitwise-conv.",
                "RaidServe: one sample of the trace for the curves of figure 10, without an "
                "interval; curves of its figure 9 over time are not drawn.",
                "AnchorTP: figure 5 from 8 down to 2 on processes. In place the first token of a "
                f"dense model comes after {shares} of a restart (bar 0.1): a restart takes "
                f"{restart[0]:.0f} s, most of it the start of Python and not of weights, of which "
                f"there are {figure_at(figures.ANCHORTP_RECOVERY, 'model_bytes') / 1e9:.2f} GB.",
                "KevlarFlow: the baseline of TensorRT-LLM; figures 1 and 5 to 7 as curves. Table 1 "
                "is of virtual time.",
            ),
        ]
    )


def simulator() -> str:
    """A comparison of simulated figures with real ones."""
    real = kept(figures.KILLS)["policies"]["auto"]
    ours = kept(figures.KILLS_SIMULATED)["ways"]["auto"]
    seeds = fmean(ours["p99_s_by_seed"].values())
    pairs = (
        ("p50 of all pauses", ours["p50_s"], real["pause_s"]["p50"]),
        ("mean of all pauses", ours["mean_s"], real["pause_s"]["mean"]),
        ("p99 of a series, mean of the series", seeds, real["p99_of_seeds"]["mean"]),
    )
    lines = [
        "| pauses of `auto`, kill series | simulated, ms | real processes, ms |",
        "| --- | --- | --- |",
        *(
            f"| {what} | {simulated * 1e3:.0f} | {real * 1e3:.0f} |"
            for what, simulated, real in pairs
        ),
    ]
    return "\n\n".join(
        [
            "## The simulator beside a real run",
            _wrapped(
                "No experiment compares a simulated run with a real one of the same configuration, "
                "nor with another simulator. The nearest are the two kill series, which have the "
                "same streams and kills and another link:"
            ),
            "\n".join(lines),
            _wrapped(
                "Known differences to DistServe and vLLM at the same profile: the first token "
                "comes from the decode instance, a hand-off and a step later than from prefill; a "
                "step has no overhead beside its profile; the first request of a cold world waits "
                "for links."
            ),
        ]
    )


def missed_bars() -> str:
    """Every kept result whose text says that it misses a bar, shown above or not."""
    lines = ["| result | misses |", "| --- | --- |"]
    for text in sorted(EXPERIMENTS.glob("*/results/**/*.txt")):
        path = text.relative_to(EXPERIMENTS)
        found = misses(str(path))
        if found:
            name = f"{path.parts[0]}/{'/'.join(path.with_suffix('').parts[2:])}"
            link = f"[{name}](../experiments/{path.parts[0]})"
            lines.append(f"| {link} | {'; '.join(found)} |")
    return "\n\n".join(
        [
            "## Kept results that miss a bar",
            f"{len(lines) - 2} of them. Bars that were missed by scripts that are gone: [measured "
            "once](research/measured.md).",
            "\n".join(lines),
        ]
    )


def distserve() -> str:
    costs = [
        f"{kept(_BACKUP)[f'{way}_cpu_cost']:+.1%} ± {kept(_BACKUP)[f'{way}_cpu_cost_interval']:.1%}"
        for way in ("local", "both")
    ]
    return "\n\n".join(
        [
            "## KVRS on DistServe",
            _wrapped(
                "These runs need a checkout of DistServe, which is not part of the project "
                "([distserve](guide/distserve.md) says which and how): `export "
                "DISTSERVE_HOME=DIR`, then"
            ),
            _list(
                "Are streams exact under every death? `kills.run everything distserve`; yes, "
                "under each policy: `--policy rom`, `always_migrate`, `always_recompute`, "
                "`always_restore` (with `--backup both`). How long their pauses are cannot be "
                "compared by one run each.",
                "What does host backup cost? Measured once ([distserve_backup](../experiments/"
                "measured_once)): `off`, `local` and `both` in turns over the same processes. "
                f"{costs[0]} of the CPU of a token with `local`, {costs[1]} with `both`.",
                "What do the patches cost? Measured once (distserve_overhead): nothing, the "
                "patched server takes less CPU for a token than the plain one.",
                "Is a hand-off to another server worth it under skew, and from which queue on? "
                "Measured once (skew_distserve, skew_rates_distserve, hand_off_distserve).",
                "Migrate or recompute, decided by the tables that the stages measure themselves: "
                "measured once (crossover_distserve). `rom` is wrong there where a stage reads "
                "many known tokens one a step.",
            ),
            "What no command answers yet:",
            _list("**A GPU.** Copies of pages between device and host run there only."),
        ]
    )


def _list(*items: str) -> str:
    return "\n".join(_wrapped(item, "- ") for item in items)


def _wrapped(text: str, first: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
