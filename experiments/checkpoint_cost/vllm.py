"""Cost of the kvrs connector in real vLLM on the CPU: saving, faults of agents, aborts, restoring.

    python -m experiments.checkpoint_cost.vllm [--rounds 60] [--aborts 200] [--pairs 20]

Saving: the same streams with and without it, in turns, at one server: CPU time of its processes per
token, and the time between tokens. Faults: gaps of streams while the agent that they are saved to
fails, and while a restore waits for it. Aborts: what is left of requests that clients left in
mid-load and mid-save. Restoring: the first token after a history, loaded and computed.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.checkpoint_cost.run import paired, percentile
from experiments.checkpoint_cost.vllm_bench import (
    HISTORY_TOKENS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SETTLE_S,
    STREAMS,
    Bench,
    Side,
)
from experiments.record import Record
from experiments.rig import interval
from kvrs_testkit.vllm_clients import clients
from kvrs_testkit.vllm_servers import PAGE_TOKENS, PYTHON_ENV, VllmServers, connector_config

WANTED_COST = 0.05
DEADLINE_S = 2.0  # Of the connector, for pages.
COMPUTE_S = 2.0  # At most, of a history.
PAGES_SAVED_SHARE = 0.85  # The last pages of a stream that ends are not sent any more.
# In the last row the history is computed and not restored: its gap is vLLM's own.
FAULTS = ("none", "stopped", "dead", "slow", "full", "computed")


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


async def measure(
    servers: VllmServers, rounds: int, aborts: int, pairs: int, repeats: int, seed: int
) -> dict[str, Any]:
    off, on = Side(saves=False), Side(saves=True)
    order = random.Random(seed)
    async with clients(servers) as client:
        bench = Bench(servers, client, seed)
        for saves in (False, True):
            await bench.round(Side(saves))
        _say(f"{rounds} pairs of rounds")
        for _ in range(rounds):
            for side in order.sample((off, on), 2):
                await bench.round(side)
        _say(f"{pairs} histories, loaded and computed")
        loaded_s: list[float] = []
        computed_s: list[float] = []
        await bench.pair([], [])
        for _ in range(pairs):
            await bench.pair(loaded_s, computed_s)
        _say("faults of the agent")
        faults = []
        for kind in FAULTS:
            for _ in range(repeats):
                save = await bench.save_beside(kind) if kind != "computed" else {}
                restore = await bench.restore_beside(kind) if kind != "full" else {}
                faults.append({"fault": kind} | save | restore)
                _say(str(faults[-1]))
        _say(f"{aborts} aborts")
        left = await bench.aborts(aborts)
        reports = [await client.report(each) for each in (bench.d0, bench.d1)]
    return {
        "saving": _saving(off, on),
        "restoring": _restoring(loaded_s, computed_s),
        "faults": faults,
        "aborts": left,
        "off_reasons": [each.off_reason for each in reports if each.off_reason],
    }


def _saving(off: Side, on: Side) -> dict[str, Any]:
    pages = len(on.cpu_s) * STREAMS * ((PROMPT_TOKENS + OUTPUT_TOKENS - 1) // PAGE_TOKENS)
    return {
        "rounds": len(on.cpu_s),
        "pages_saved": on.pages_saved,
        "pages": pages,
        **{
            name: {
                "off": statistics.median(getattr(off, name)),
                "on": statistics.median(getattr(on, name)),
                "cost": cost,
                "interval": spread,
            }
            for name in ("cpu_s", "tpot_s")
            for cost, spread in (paired(getattr(off, name), getattr(on, name)),)
        },
        "gap_s_p99": {
            name: percentile(side.gaps_s, 0.99) for name, side in (("off", off), ("on", on))
        },
    }


def _restoring(loaded_s: Sequence[float], computed_s: Sequence[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(loaded_s, computed_s, strict=True)]
    return {
        "pairs": len(ratios),
        "history_tokens": HISTORY_TOKENS,
        "loaded_s": statistics.median(loaded_s),
        "computed_s": statistics.median(computed_s),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
    }


def as_text(result: dict[str, Any]) -> str:
    saving, restoring, left = result["saving"], result["restoring"], result["aborts"]
    cpu, tpot = saving["cpu_s"], saving["tpot_s"]
    lines = [
        f"saving on against off, {saving['rounds']} interleaved pairs of {STREAMS} streams "
        f"({PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens), {saving['pages_saved']} of "
        f"{saving['pages']} pages saved",
        f"  CPU per token: {cpu['off'] * 1e6:.0f} / {cpu['on'] * 1e6:.0f} us, "
        f"{cpu['cost']:+.1%} ± {cpu['interval']:.1%}",
        f"  TPOT: {tpot['off'] * 1e3:.2f} / {tpot['on'] * 1e3:.2f} ms, "
        f"{tpot['cost']:+.1%} ± {tpot['interval']:.1%}",
        f"restoring {restoring['history_tokens']} tokens, {restoring['pairs']} pairs: first token "
        f"after {restoring['loaded_s'] * 1e3:.0f} ms loaded, {restoring['computed_s'] * 1e3:.0f} "
        f"ms computed, ratio {restoring['ratio']:.2f} ± {restoring['interval']:.2f}",
        "fault of the agent: longest gap of saved streams, ms; restore: first token, s; pages; "
        "longest gap beside it, ms; computed: the same history without a restore",
    ]
    for row in result["faults"]:
        restore = (
            f"{row['restore_first_token_s']:6.2f} {row['restore_loaded_pages']:3} of "
            f"{row['restore_pages']} {row['restore_gap_ms']:6.0f}"
            if "restore_pages" in row
            else ""
        )
        save = f"{row['save_gap_ms']:6.0f}" if "save_gap_ms" in row else ""
        lines.append(f"  {row['fault']:<8}{save:>6}  {restore}".rstrip())
    lines.append(
        f"{left['aborts']} aborts, {left['aborts_with_tokens']} of them after the first token; "
        f"{SETTLE_S:.0f} s later: {left['pinned_blocks']} blocks pinned, KV cache use "
        f"{left['kv_cache_usage']:g}, {left['running']:g} requests"
    )
    return "\n".join(lines) + "\n"


def faults_of(result: dict[str, Any]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    saving, left = result["saving"], result["aborts"]
    faults = [f"the connector is off: {reason}" for reason in result["off_reasons"]]
    if saving["pages_saved"] < PAGES_SAVED_SHARE * saving["pages"]:
        faults.append(f"{saving['pages_saved']} of {saving['pages']} pages were saved")
    if saving["cpu_s"]["cost"] > WANTED_COST:
        faults.append(f"saving costs {saving['cpu_s']['cost']:.1%} CPU per token")
    if result["restoring"]["ratio"] >= 1:
        faults.append("loading is no faster than computing")
    for row in result["faults"]:
        if not row.get("restore_exact", True):
            faults.append(f"agent {row['fault']}: tokens differ")
        if row.get("restore_first_token_s", 0.0) > DEADLINE_S + COMPUTE_S:
            faults.append(f"agent {row['fault']}: {row['restore_first_token_s']:.1f} s to restore")
    kept = {name: left[name] for name in ("pinned_blocks", "kv_cache_usage", "running")}
    return faults + [f"{value} {name} after aborts" for name, value in kept.items() if value]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        config = connector_config(Path(directory), transfer={"probe_interval_s": 3600.0})
        cluster = config.cluster.model_copy(update={"allow_faults": True})
        config = config.model_copy(update={"cluster": cluster})
        with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
            servers.start_all()
            result = asyncio.run(
                measure(
                    servers,
                    options.rounds,
                    options.aborts,
                    options.pairs,
                    options.repeats,
                    options.seed,
                )
            )
    faults = faults_of(result)
    text = as_text(result) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    is_void = record.keep(options.out, "vllm", result, text)
    return 2 if is_void else 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
