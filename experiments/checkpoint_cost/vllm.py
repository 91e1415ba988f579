"""Cost of the kvrs connector in real vLLM: saving, faults of agents, aborts, restoring.

    python -m experiments.checkpoint_cost.vllm [--rounds 60] [--aborts 200] [--pairs 20]
    python -m experiments.checkpoint_cost.vllm --gpu [--rounds 20] [--pairs 10]

On the CPU a tiny model in float32; with `--gpu` the shape of Llama-3.1-8B in bfloat16 with random
weights, two servers on one GPU, saving and restoring alone.

Saving: the same streams with and without it, in turns, at one server: CPU time of its processes per
token, and the time between tokens. Faults: gaps of streams while the agent that they are saved to
fails, and while a restore waits for it. Aborts: what is left of requests that clients left in
mid-load and mid-save. Restoring: the first token after a history, loaded and computed.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import ClientError

from experiments.checkpoint_cost.vllm_bench import (
    SETTLE_S,
    Bench,
    Load,
    Pair,
    Side,
)
from experiments.command_line import parser_of
from experiments.record import Record
from experiments.rig import interval, paired, percentile
from kvrs.config.file import Config
from kvrs_testkit.vllm_clients import clients
from kvrs_testkit.vllm_servers import (
    GPU_FLAGS,
    PAGE_TOKENS,
    PYTHON_ENV,
    VllmServers,
    connector_config,
)

MAX_COST = 0.02
# Of the first token after a history, loaded, to the same computed.
MAX_RATIO, GPU_MAX_RATIO = 1.0, 1 / 3
MAX_GAP_MS = 50  # Of streams beside, whatever the agent does.
# Of a step on the CPU: that many of a history take less than that gap.
CPU_FLAGS = ("--max-num-batched-tokens", "512")
DEADLINE_S = 2.0  # Of the connector, for pages.
COMPUTE_S = 2.0  # At most, of a history.
PAGES_SAVED_SHARE = 0.85  # The last pages of a stream that ends are not sent any more.
# In the last row the history is computed and not restored: its gap is vLLM's own.
# Of Llama-3.1-8B; a page of 32 tokens has 4 MB.
SHAPE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
# Graphs of whole decode steps, without a compiler; 12 GiB hold 98,304 tokens of KV.
SHAPE_FLAGS = [
    *("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "9216"),
    *("--no-enforce-eager", "--compilation-config"),
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64]}',
    *("--kv-cache-memory-bytes", str(12 << 30), "--max-num-seqs", "64"),
]
GPU_LOAD = Load(
    streams=64,
    prompt_tokens=40,
    output_tokens=400,
    reserved_bytes=64 << 20,
    history_tokens=8000,
    history_reserved_bytes=2 << 30,
    saving_tokens=1200,
)
GPU_OPTIONS = {"staging_bytes": 2 << 30, "deadline_s": 10.0}
GPU_CAPACITY_BYTES = 16 << 30
FAULTS = ("none", "stopped", "dead", "slow", "full", "computed")


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


async def measure(servers: VllmServers, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    rounds, pairs, seed = options.rounds, options.pairs, options.seed
    off, on = Side(saves=False), Side(saves=True)
    order = random.Random(seed)
    async with clients(servers) as client:
        bench = Bench(servers, client, load, seed)
        restoring = await _pairs(bench, load, pairs, GPU_MAX_RATIO if options.gpu else MAX_RATIO)
        for saves in (False, True):
            await bench.round(Side(saves))
        _say(f"{rounds} pairs of rounds")
        for _ in range(rounds):
            for side in order.sample((off, on), 2):
                await bench.round(side)
        _say(str(_saving(load, off, on)))
        others = {} if options.gpu else await _others(bench, options.aborts, options.repeats)
        reports = [await client.report(each) for each in (bench.d0, bench.d1)]
    return {
        "saving": _saving(load, off, on),
        "restoring": restoring,
        **others,
        "off_reasons": [each.off_reason for each in reports if each.off_reason],
    }


async def _pairs(bench: Bench, load: Load, count: int, most_ratio: float) -> dict[str, Any]:
    """Figures of so many pairs behind one that is not counted; one that fails is left out."""
    _say(f"{count} histories, loaded and computed")
    done: list[Pair] = []
    failed: list[str] = []
    for number in range(count + 1):
        try:
            pair = await bench.pair()
        except (AssertionError, OSError, TimeoutError, ClientError) as error:
            failed.append(repr(error))
            _say(f"a pair failed: {failed[-1]}")
            continue
        _say(str(pair))
        if number:
            done.append(pair)
    return _restoring(load, done) | {"most_ratio": most_ratio, "failed": failed}


async def _others(bench: Bench, aborts: int, repeats: int) -> dict[str, Any]:
    _say("faults of the agent")
    faults = []
    for kind in FAULTS:
        for _ in range(repeats):
            save = await bench.save_beside(kind) if kind != "computed" else {}
            restore = await bench.restore_beside(kind) if kind != "full" else {}
            faults.append({"fault": kind} | save | restore)
            _say(str(faults[-1]))
    _say(f"{aborts} aborts")
    return {"faults": faults, "aborts": await bench.aborts(aborts)}


def _saving(load: Load, off: Side, on: Side) -> dict[str, Any]:
    of_stream = (load.prompt_tokens + load.output_tokens - 1) // PAGE_TOKENS
    pages = len(on.cpu_s) * load.streams * of_stream
    return {
        "streams": load.streams,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
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


def _restoring(load: Load, pairs: Sequence[Pair]) -> dict[str, Any]:
    if not pairs:
        return {"pairs": 0, "history_tokens": load.history_tokens}
    ratios = [pair.loaded_s / pair.computed_s for pair in pairs]
    return {
        "pairs": len(ratios),
        "history_tokens": load.history_tokens,
        "loaded_s": statistics.median(pair.loaded_s for pair in pairs),
        "computed_s": statistics.median(pair.computed_s for pair in pairs),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "pages_loaded": min(pair.pages for pair in pairs),
        # At least one token is computed.
        "pages": (load.history_tokens - 1) // PAGE_TOKENS,
        "exact": sum(pair.same for pair in pairs),
    }


def as_text(result: dict[str, Any]) -> str:
    saving, restoring = result["saving"], result["restoring"]
    cpu, tpot = saving["cpu_s"], saving["tpot_s"]
    lines = [
        f"saving on against off, {saving['rounds']} interleaved pairs of {saving['streams']} "
        f"streams ({saving['prompt_tokens']} + {saving['output_tokens']} tokens), "
        f"{saving['pages_saved']} of {saving['pages']} pages saved",
        f"  CPU per token: {cpu['off'] * 1e6:.0f} / {cpu['on'] * 1e6:.0f} us, "
        f"{cpu['cost']:+.1%} ± {cpu['interval']:.1%}",
        f"  TPOT: {tpot['off'] * 1e3:.2f} / {tpot['on'] * 1e3:.2f} ms, "
        f"{tpot['cost']:+.1%} ± {tpot['interval']:.1%}",
        f"  gaps, p99: {saving['gap_s_p99']['off'] * 1e3:.1f} / "
        f"{saving['gap_s_p99']['on'] * 1e3:.1f} ms",
    ]
    if restoring["pairs"]:
        lines.append(
            f"restoring {restoring['history_tokens']} tokens, {restoring['pairs']} pairs: first "
            f"token after {restoring['loaded_s'] * 1e3:.0f} ms loaded, "
            f"{restoring['computed_s'] * 1e3:.0f} ms computed, ratio {restoring['ratio']:.2f} ± "
            f"{restoring['interval']:.2f}; {restoring['exact']} of them exact"
        )
    return "\n".join([*lines, *(_others_as_lines(result) if "faults" in result else ())]) + "\n"


def _others_as_lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        "fault of the agent: longest gap of saved streams, ms; restore: first token, s; pages; "
        "longest gap beside it, ms; computed: the same history without a restore"
    )
    for row in result["faults"]:
        restore = (
            f"{row['restore_first_token_s']:6.2f} {row['restore_loaded_pages']:3} of "
            f"{row['restore_pages']} {row['restore_gap_ms']:6.0f}"
            if "restore_pages" in row
            else ""
        )
        save = f"{row['save_gap_ms']:6.0f}" if "save_gap_ms" in row else ""
        yield f"  {row['fault']:<8}{save:>6}  {restore}".rstrip()
    left = result["aborts"]
    yield (
        f"{left['aborts']} aborts, {left['aborts_with_tokens']} of them after the first token; "
        f"{SETTLE_S:.0f} s later: {left['pinned_blocks']} blocks pinned, KV cache use "
        f"{left['kv_cache_usage']:g}, {left['running']:g} requests"
    )


def faults_of(result: dict[str, Any]) -> list[str]:
    """The parts of the claim that the result does not bear out."""
    saving, restoring = result["saving"], result["restoring"]
    faults = [f"the connector is off: {reason}" for reason in result["off_reasons"]]
    if saving["pages_saved"] < PAGES_SAVED_SHARE * saving["pages"]:
        faults.append(f"{saving['pages_saved']} of {saving['pages']} pages were saved")
    faults += [
        f"saving costs {saving[name]['cost']:.1%} {what}, more than {MAX_COST:.0%}"
        for name, what in (("cpu_s", "CPU per token"), ("tpot_s", "TPOT"))
        if saving[name]["cost"] > MAX_COST
    ]
    faults += [f"a pair failed: {each}" for each in restoring["failed"]]
    if not restoring["pairs"]:
        return [*faults, "no history was loaded and computed"]
    if restoring["ratio"] > restoring["most_ratio"]:
        faults.append(
            f"loading takes {restoring['ratio']:.2f} of the time of computing; bar "
            f"{restoring['most_ratio']:.2f}"
        )
    if restoring["pages_loaded"] < restoring["pages"]:
        faults.append(f"{restoring['pages_loaded']} of {restoring['pages']} pages were loaded")
    if restoring["exact"] < restoring["pairs"]:
        faults.append(f"{restoring['pairs'] - restoring['exact']} histories went on otherwise")
    for row in result.get("faults", ()):
        if not row.get("restore_exact", True):
            faults.append(f"agent {row['fault']}: tokens differ")
        if row.get("restore_first_token_s", 0.0) > DEADLINE_S + COMPUTE_S:
            faults.append(f"agent {row['fault']}: {row['restore_first_token_s']:.1f} s to restore")
        if (gap_ms := max(row.get(f"{each}_gap_ms", 0.0) for each in ("save", "restore"))) > (
            MAX_GAP_MS
        ):
            faults.append(f"agent {row['fault']}: a gap of {gap_ms:.0f} ms beside it")
    if "aborts" not in result:
        return faults
    left = result["aborts"]
    kept = {name: left[name] for name in ("pinned_blocks", "kv_cache_usage", "running")}
    return faults + [f"{value} {name} after aborts" for name, value in kept.items() if value]


def _config(directory: Path, *, on_gpu: bool) -> Config:
    backup = {"mode": "remote"} | ({"capacity_bytes": GPU_CAPACITY_BYTES} if on_gpu else {})
    config = connector_config(directory, transfer={"probe_interval_s": 3600.0}, backup=backup)
    if on_gpu:
        assert config.cluster.model is not None
        path = Path(config.cluster.model) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE))
    cluster = config.cluster.model_copy(update={"allow_faults": True})
    return config.model_copy(update={"cluster": cluster})


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--aborts", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    record = Record(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        config = _config(Path(directory), on_gpu=options.gpu)
        flags = [*GPU_FLAGS, *SHAPE_FLAGS] if options.gpu else [*CPU_FLAGS]
        with VllmServers(config, os.environ[PYTHON_ENV], *flags) as servers:
            servers.connector_options = GPU_OPTIONS if options.gpu else {}
            servers.start_all()
            load = GPU_LOAD if options.gpu else Load()
            result = asyncio.run(measure(servers, load, options))
    faults = faults_of(result)
    text = as_text(result) + "\n".join(faults or ["PASSED"]) + "\n"
    print(text, end="")
    is_void = record.keep(options.out, "vllm-gpu" if options.gpu else "vllm", result, text)
    return 2 if is_void else 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
