"""Derive the profiles that come with kvrs from published tables, and measure how well they
reproduce them.

The sources are not part of this repository; `--sources` names the folder that holds them (see
README.md for their origin).
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from experiments.record import Record
from kvrs.profiles.schema import Profile, faults

DATA = Path(__file__).parents[2] / "kvrs" / "profiles" / "data"
PAGE_SIZE_TOKENS = 16
# System specifications of aiconfigurator 0.12.0 (Apache-2.0): PCIe of one GPU.
PCIE_BYTES_PER_S = {"a100": 32e9, "h100": 64e9, "h200": 64e9}
GPU_NAMES = {"a100": "A100-80G SXM", "h100": "H100-80G SXM", "h200": "H200 SXM"}
SCALED_FROM = "Qwen3-14B"
DECODE_THRESHOLDS = (4, 8, 16, 32, 64, 128)

Point = tuple[int, int, float]


@dataclass(frozen=True)
class Model:
    """The published configuration, as far as the sizes of weights and KV depend on it."""

    name: str  # On the Hugging Face hub.
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int = 1
    # Three matrices per feed-forward block and no learned positions; else two, and OPT's 2,050
    # positions.
    gated: bool = True
    head_dim: int = 128

    @property
    def block_parameters(self) -> int:
        """Parameters of all layers that a token passes through, with every expert counted."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (
            attention + self.experts * (3 if self.gated else 2) * self.hidden * self.ffn
        )

    @property
    def parameters(self) -> int:
        # OPT ties its output matrix to its embedding; the others here do not.
        return self.block_parameters + self.hidden * (
            2 * self.vocab if self.gated else self.vocab + 2050
        )

    def geometry(self) -> dict[str, int]:
        shape = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {**shape, "dtype_bytes": 2, "page_size_tokens": PAGE_SIZE_TOKENS}

    def geometry_source(self) -> str:
        return (
            f"config.json of {self.name} on the Hugging Face hub: {self.layers} layers, "
            f"{self.kv_heads} KV heads of "
            f"{self.head_dim}; pages of {PAGE_SIZE_TOKENS} tokens are kvrs's choice"
        )


MODELS = {
    "opt-13b": Model("facebook/opt-13b", 40, 5120, 40, 40, 20480, 50272, gated=False),
    "opt-66b": Model("facebook/opt-66b", 64, 9216, 72, 72, 36864, 50272, gated=False),
    "Llama-3.1-8B": Model("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": Model("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
    "Qwen3-14B": Model("Qwen/Qwen3-14B", 40, 5120, 40, 8, 17408, 151936),
    "Qwen3-32B": Model("Qwen/Qwen3-32B", 64, 5120, 64, 8, 25600, 151936),
    "Mixtral-8x22B": Model(
        "mistralai/Mixtral-8x22B-v0.1", 56, 6144, 48, 8, 16384, 32000, experts=8
    ),
}


@dataclass(frozen=True)
class DecodeFit:
    large_from_batch: int
    small_ms: list[float]
    large_ms: list[float]
    rms: float
    worst: float

    def scaled(self, fixed: float, context: float) -> "DecodeFit":
        a, b = (
            [c[0] * fixed, c[1] * context, c[2] * fixed] for c in (self.small_ms, self.large_ms)
        )
        return DecodeFit(self.large_from_batch, a, b, self.rms, self.worst)

    def as_json(self) -> dict[str, Any]:
        small, large = ([_rounded(x) for x in c] for c in (self.small_ms, self.large_ms))
        return {
            "type": "fit",
            "large_from_batch": self.large_from_batch,
            "small_ms": small,
            "large_ms": large,
        }


def distserve_profiles(sources: Path) -> Iterator[dict[str, Any]]:
    """OPT on A100: least-squares fits that DistServe's authors made of measured batches, with two
    engines.
    """
    for file, engine, slug in (
        ("profiler-a100-80g.distserve.json", "DistServe (SwiftTransformer)", "distserve"),
        ("profiler-a100-80g.vllm.json", "vLLM", "vllm"),
    ):
        for long_name, by_tp in json.loads((sources / file).read_text()).items():
            short = long_name.removeprefix("facebook/")
            for tp, fit in by_tp.items() if short in MODELS else ():
                source = (
                    f"LLMServe/DistServe, simdistserve profile {file} (Apache-2.0): "
                    f"least-squares fits of measured batches, "
                    "in ms; 2,048 tokens is the model's longest context"
                )
                version = (
                    "OSDI 2024 release" if slug == "distserve" else None
                )  # Its profile does not say which vLLM.
                yield {
                    **_head(
                        MODELS[short],
                        f"{short}-a100-{slug}-tp{tp}",
                        "fp16",
                        "a100",
                        int(tp),
                        engine,
                        version,
                        "measured",
                        source,
                    ),
                    "gpu": "A100-80G",
                    "prefill": {
                        "type": "quadratic",
                        "coefficients_ms": fit["prefill"],
                        "max_tokens": 2048,
                    },
                    "decode": {
                        "type": "fit",
                        "large_from_batch": fit["decoding_large_small_bs_threshold"],
                        "small_ms": fit["decoding_smallbs"],
                        "large_ms": fit["decoding_largebs"],
                    },
                }


def estimated_profiles(sources: Path, report: list[str]) -> Iterator[dict[str, Any]]:
    """The estimates of aiconfigurator for vLLM, and Llama-3.1-8B scaled from its Qwen3-14B."""
    prefill = _rows(sources / "aiconfigurator_prefill_estimates.csv")
    decode = _rows(sources / "aiconfigurator_decode_estimates.csv")
    for key, rows in prefill.items():
        name, system, backend, version, tp, dtype = key
        gpu = system.removesuffix("_sxm")
        points = [
            (
                int(r["input_tokens"]) - int(r["cached_prefix"]),
                int(r["cached_prefix"]),
                float(r["prefill_ms"]) / 1e3,
            )
            for r in rows
        ]
        steps = [
            (int(r["batch"]), int(r["context_tokens"]), float(r["decode_step_ms"]))
            for r in decode[key]
        ]
        line = {new: seconds for new, cached, seconds in points if cached == 0}
        pair, pair_error = pair_term(points, line)
        fit = decode_fit(steps)
        label = f"{name.lower()}-{gpu}-{backend}-tp{tp}"
        report.append(f"{label:<32}{pair_error:>10.1%}{fit.rms:>12.1%}{fit.worst:>10.1%}")
        note = (
            f"aiconfigurator 0.12.0 (Apache-2.0), its database for {backend} {version} "
            f"on {system}, batch 1: "
            "estimates, not measurements. "
            f"Prefill: its lengths without a prefix, and one term new x cached fitted to "
            f"its four lengths with one "
            f"(within {pair_error:.1%}). "
            f"Decode: DistServe's form fitted to its 63 points (rms {fit.rms:.1%}, worst "
            f"{fit.worst:.1%})"
        )
        longest_cached = max(cached for _, cached, _ in points)
        yield _estimated(
            MODELS[name], label, dtype, gpu, int(tp), version, note, line, pair, longest_cached, fit
        )
        if name == SCALED_FROM and tp == "1":
            yield _scaled(
                MODELS["Llama-3.1-8B"], gpu, version, dtype, note, line, pair, longest_cached, fit
            )


def pair_term(points: list[Point], line: dict[int, float]) -> tuple[float, float]:
    """Seconds per (new token, cached token), least relative squares; and the worst relative error
    of T(new) + term.
    """
    behind = [(new, cached, seconds) for new, cached, seconds in points if cached]
    alone = [float(np.interp(new, list(line), list(line.values()))) for new, *_ in behind]
    x = np.array([new * cached / seconds for new, cached, seconds in behind])
    y = np.array([1 - base / seconds for base, (*_, seconds) in zip(alone, behind, strict=True)])
    term = max(0.0, float(x @ y / (x @ x)))
    return term, float(np.max(np.abs(term * x - y)))


def decode_fit(points: list[Point]) -> DecodeFit:
    """`a + b * batch * context + c * batch` below and from a threshold that fits best; least
    relative squares, none negative.
    """
    fits = []
    for threshold in DECODE_THRESHOLDS:
        parts = [p for p in points if p[0] < threshold], [p for p in points if p[0] >= threshold]
        small, large = (_not_negative(part) for part in parts)
        errors = [
            float(np.dot(c, (1.0, batch * context, batch)) / ms - 1)
            for part, c in zip(parts, (small, large), strict=True)
            for batch, context, ms in part
        ]
        fits.append(
            DecodeFit(
                threshold,
                small,
                large,
                float(np.sqrt(np.mean(np.square(errors)))),
                float(np.max(np.abs(errors))),
            )
        )
    return min(fits, key=lambda fit: fit.rms)


def _not_negative(points: list[Point]) -> list[float]:
    kept = [0, 1, 2]
    rows = np.array([(1.0, batch * context, batch) for batch, context, _ in points])
    weights = np.array([1 / ms for *_, ms in points])
    while True:
        found = np.linalg.lstsq(rows[:, kept] * weights[:, None], np.ones(len(points)), rcond=None)[
            0
        ]
        if found.min() >= 0:
            by_term = dict(zip(kept, found, strict=True))
            return [float(by_term.get(k, 0.0)) for k in range(3)]
        del kept[int(found.argmin())]


def _estimated(
    model: Model,
    label: str,
    dtype: str,
    gpu: str,
    tp: int,
    version: str,
    source: str,
    line: dict[int, float],
    pair: float,
    longest_cached: int,
    fit: DecodeFit,
) -> dict[str, Any]:
    return {
        **_head(model, label, dtype, gpu, tp, "vLLM", version, "estimated", source),
        "prefill": {
            "type": "points",
            "seconds": {str(tokens): _rounded(seconds) for tokens, seconds in line.items()},
            "cached": {
                "seconds_per_token_pair": _rounded(pair),
                "max_cached_tokens": longest_cached,
            },
        },
        "decode": fit.as_json(),
    }


def _scaled(
    model: Model,
    gpu: str,
    version: str,
    dtype: str,
    note: str,
    line: dict[int, float],
    pair: float,
    longest: int,
    fit: DecodeFit,
) -> dict[str, Any]:
    """No source at hand has Llama-3.1-8B: its blocks and its attention are scaled from a model of
    the same make.
    """
    base = MODELS[SCALED_FROM]
    blocks = model.block_parameters / base.block_parameters
    attention = model.layers * model.heads / (base.layers * base.heads)
    kv = model.layers * model.kv_heads / (base.layers * base.kv_heads)
    # Attention of n tokens to each other: half of n x n pairs.
    line = {
        n: blocks * (s - pair * n * n / 2) + attention * pair * n * n / 2 for n, s in line.items()
    }
    source = (
        f"scaled by kvrs from {SCALED_FROM}, because no table at hand has this model: "
        f"work per token by the layers' "
        f"parameters (x {blocks:.3f}), "
        f"attention by layers and heads (x {attention:.3f}), decode's part per context "
        f"token by KV bytes "
        f"(x {kv:.3f}). Of {SCALED_FROM}: {note}"
    )
    label = f"{model.name.split('/')[1].lower()}-{gpu}-vllm-tp1"
    return _estimated(
        model,
        label,
        dtype,
        gpu,
        1,
        version,
        source,
        line,
        attention * pair,
        longest,
        fit.scaled(blocks, kv),
    )


def _head(
    model: Model,
    label: str,
    dtype: str,
    gpu: str,
    tp: int,
    engine: str,
    version: str | None,
    kind: str,
    source: str,
) -> dict[str, Any]:
    rate = PCIE_BYTES_PER_S[gpu]
    return {
        "label": label,
        "model": model.name,
        "dtype": dtype,
        "gpu": GPU_NAMES[gpu],
        "tp": tp,
        "engine": engine,
        "version": version,
        "kind": kind,
        "source": source,
        "geometry": model.geometry(),
        "geometry_source": model.geometry_source(),
        "load": {
            "weight_bytes": 2 * model.parameters,
            "bytes_per_s": tp * rate,
            "source": (
                f"estimated: {model.parameters / 1e9:.2f} billion parameters of 2 bytes "
                f"over the PCIe links of {tp} GPU "
                f"({rate / 1e9:.0f} GB/s "
                "each in the system specifications of aiconfigurator 0.12.0, "
                "Apache-2.0), weights already in host memory"
            ),
        },
    }


def link_file(sources: Path) -> list[dict[str, Any]]:
    """The alpha-beta fits of vidur's measurements, and specifications for the one GPU that it has
    none of.
    """
    document = json.loads((sources / "links.json").read_text())
    specs = document["system_specs_aiconfigurator_0.12.0_Apache-2.0"]["h200_sxm"]
    by_spec = [
        {
            "label": f"h200-sxm-{scope}-node",
            "gpu": "H200",
            "scope": f"{scope}_node",
            "kind": "estimated",
            "source": "figures of the system specifications of aiconfigurator 0.12.0 (Apache-2.0), "
            "not measured",
            "transfer": {"alpha_s": specs["p2p_latency"], "bytes_per_s": specs[f"{scope}_node_bw"]},
        }
        for scope in ("inter", "intra")
    ]
    measured = [
        {
            "label": name.replace("_", "-"),
            "gpu": name.split("_")[0].upper(),
            "scope": "intra_node" if "intra" in name else "inter_node",
            "kind": "measured",
            "source": (
                "microsoft/vidur, send_recv of its network profiles (MIT): least-squares "
                "fit t = alpha + bytes / rate of "
                f"median times "
                f"of messages of 1 MiB to {link['max_bytes'] >> 20} MiB; its sizes are "
                f"taken as bytes"
            ),
            "transfer": {
                "alpha_s": _rounded(link["alpha_us"] * 1e-6),
                "bytes_per_s": _rounded(link["bandwidth_GBps"] * 1e9),
            },
        }
        for name, link in document["links"].items()
    ]
    return measured + by_spec


def _rows(path: Path) -> dict[tuple[str, ...], list[dict[str, str]]]:
    groups = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            groups[
                tuple(
                    row[key] for key in ("model", "system", "backend", "db_version", "tp", "dtype")
                )
            ].append(row)
    return groups


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA, help="where the profiles go")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record = Record(timed=False)
    arguments.data.mkdir(parents=True, exist_ok=True)
    report = [
        f"{'errors of the fits against their source':<32}\n{'profile':<32}{'cached':>10}"
        f"{'decode rms':>12}{'worst':>10}"
    ]
    found = [*distserve_profiles(arguments.sources), *estimated_profiles(arguments.sources, report)]
    for each in found:
        profile = msgspec.convert(each, Profile, str_keys=True)
        assert not list(faults(profile)), (each["label"], list(faults(profile)))
        (arguments.data / f"{each['label']}.json").write_text(json.dumps(each, indent=2) + "\n")
    (arguments.data / "links.json").write_text(
        json.dumps(link_file(arguments.sources), indent=2) + "\n"
    )
    text = "\n".join([*report, f"{len(found)} profiles"])
    print(text)
    record.keep(arguments.out, "fit_errors", {"profiles": [each["label"] for each in found]}, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
