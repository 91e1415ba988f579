"""`kvrs profile`: measure an engine on this machine and write a profile file.

Prefill is measured by new and cached tokens, decode by batch and context. The content of cached KV
is arbitrary, because the time of a step does not depend on it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from kvrs.config.cluster import EngineSettings
from kvrs.errors import ConfigError
from kvrs.profiles.catalog import (
    DecodeRows,
    ModelLoad,
    PrefillRows,
    Profile,
    faults_of_out,
    write_profile,
)
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.warm_up import any_ids, prefill_s, processor
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

NEW_INTERVALS = 8
CACHED_INTERVALS = 4
CONTEXT_INTERVALS = 4
DEFAULT_LONGEST_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of the command line."""

    out: Path
    model: Path | None = None  # A Hugging Face directory; None: the tiny generated model.
    label: str | None = None  # None: derived from model and device.
    device: str = "cpu"
    longest_tokens: int | None = (
        None  # Limit of new and of cached tokens; None: 1,024, or the model's limit.
    )
    max_batch: int = 16
    max_batch_tokens: int = (
        EngineSettings().max_batch_tokens
    )  # Size of a chunk of prefill, as in the engine.
    repeats: int = 3  # Number of measurements, of which the median is used.
    seed: int = 0  # Seed of the generated model.


def run_profile(options: ProfileOptions, console: Console | None = None) -> Path:
    """Measure, write the profile, and return the path of the file.

    Raises:
        ConfigError: an option is wrong; nothing was measured.
    """
    _check(options)
    with _model_directory(options) as model:
        profile = _measure(options, model, console or Console(stderr=True))
    return write_profile(profile, options.out)


def _check(options: ProfileOptions) -> None:
    wrong = []
    limits = (("--max-batch", options.max_batch, 2, 1024), ("--repeats", options.repeats, 1, 100))
    wrong += [
        f"{name}: got {value}; allowed: {low} to {high}"
        for name, value, low, high in limits
        if not low <= value <= high
    ]
    if options.longest_tokens is not None and not 16 <= options.longest_tokens <= 1 << 20:
        wrong.append(f"--longest-tokens: got {options.longest_tokens}; allowed: 16 to {1 << 20}")
    if options.device not in ("cpu", "cuda"):
        wrong.append(f"--device: got {options.device!r}; allowed: 'cpu', 'cuda'")
    if options.model is not None and not (options.model / "config.json").is_file():
        wrong.append(
            f"--model: {options.model} has no config.json; allowed: a Hugging Face model directory"
        )
    wrong += faults_of_out(options.out)
    if wrong:
        raise ConfigError(wrong)


@contextmanager
def _model_directory(options: ProfileOptions) -> Iterator[Path]:
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="kvrs-profile-") as scratch:
        directory = Path(scratch) / "tiny-llama"
        write_tiny_model(directory, options.seed)
        yield directory


def _measure(options: ProfileOptions, model: Path, console: Console) -> Profile:
    settings = _engine_settings(options)
    started_s = time.perf_counter()
    worker = Worker(model, settings)
    load_s = time.perf_counter() - started_s
    longest = _longest(options, worker)
    rig = _Rig(worker, options, longest, console)
    prefill, decode = rig.prefill(), rig.decode()
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    load = ModelLoad(
        weight_bytes=weight_bytes,
        bytes_per_s=weight_bytes / load_s,
        source="measured: start of a worker, from files that may have been in the page cache",
    )
    return Profile(
        **_labels(options, model, worker),
        prefill=prefill,
        decode=decode,
        load=load,
    )


def _engine_settings(options: ProfileOptions) -> EngineSettings:
    size = EngineSettings().page_size_tokens
    longest = options.longest_tokens or DEFAULT_LONGEST_TOKENS
    prefill_pages, decode_pages = -(-2 * longest // size), options.max_batch * -(-longest // size)
    return EngineSettings(
        page_size_tokens=size,
        pages=max(prefill_pages, decode_pages),
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_batch,
        max_model_len=2 * longest,
        device=options.device,  # type: ignore[arg-type] # Checked; the field's type is the check.
        seed=options.seed,
    )


def _longest(options: ProfileOptions, worker: Worker) -> int:
    """Return the largest number of new tokens, which with as many cached tokens must fit into the
    model's positions.
    """
    fits = worker.max_positions // 2
    if options.longest_tokens is not None and options.longest_tokens > fits:
        raise ConfigError(
            f"--longest-tokens: got {options.longest_tokens}; allowed: at most "
            f"{fits}, half of the model's positions"
        )
    # A multiple of the number of intervals, so that all grid points are whole numbers.
    return (
        (options.longest_tokens or min(DEFAULT_LONGEST_TOKENS, fits))
        // NEW_INTERVALS
        * NEW_INTERVALS
    )


def _labels(options: ProfileOptions, model: Path, worker: Worker) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    where = gpu or options.device
    return {
        "label": options.label or f"{model.name}-{where.lower().replace(' ', '-')}-kvrs",
        "model": model.name,
        "dtype": "fp32",
        "gpu": gpu,
        "cpu": f"{processor()}, {os.cpu_count()} CPUs",
        "tp": 1,
        "engine": "kvrs embedded engine",
        "version": version("kvrs"),
        "kind": "measured",
        "source": (
            f"kvrs profile, {time.strftime('%Y-%m-%d')}: medians of {options.repeats} "
            f"repeats, torch {torch.__version__}, "
            f"chunks of at most {options.max_batch_tokens} tokens"
        ),
        "geometry": worker.geometry,
        "geometry_source": f"config.json of {model.name}, as the engine read it",
    }


class _Rig:
    """One worker under measurement."""

    def __init__(
        self, worker: Worker, options: ProfileOptions, longest: int, console: Console
    ) -> None:
        self._worker = worker
        self._options = options
        self._longest = longest
        self._console = console
        self._size = worker.geometry.page_size_tokens

    def prefill(self) -> PrefillRows:
        """Measure prefill. One new token stands for zero: its time is the overhead of a step."""
        step, cached_step = self._longest // NEW_INTERVALS, self._longest // CACHED_INTERVALS
        lengths, prefixes = (
            range(0, self._longest + 1, step),
            range(0, self._longest + 1, cached_step),
        )
        self._prefill(0, self._longest)  # Warms up.
        cells = [
            partial(self._prefill, cached, max(1, new)) for cached in prefixes for new in lengths
        ]
        rows = _in_rows(self._medians("prefill (new given cached)", cells), len(lengths))
        return PrefillRows(new_step_tokens=step, cached_step_tokens=cached_step, rows=rows)

    def decode(self) -> DecodeRows:
        batches = _doubling(self._options.max_batch)
        contexts = [self._longest * i // CONTEXT_INTERVALS for i in range(1, CONTEXT_INTERVALS + 1)]
        self._decode(batches[-1], contexts[-1])
        cells = [partial(self._decode, batch, context) for batch in batches for context in contexts]
        rows = _in_rows(self._medians("decode (batch by context)", cells), len(contexts))
        return DecodeRows(batches=batches, contexts=contexts, rows=rows)

    def _prefill(self, cached: int, new: int) -> float:
        assert new >= 1, "a step without a token takes no time at all"
        return prefill_s(self._worker, cached + new, cached)

    def _decode(self, batch: int, context: int) -> float:
        held = -(-context // self._size)
        chunks = [
            Chunk(
                token_ids=any_ids(self._worker, 1),
                first_position=context - 1,
                pages=range(i * held, (i + 1) * held),
                logits=1,
            )
            for i in range(batch)
        ]
        started_s = time.perf_counter()
        self._worker.execute(chunks)
        return time.perf_counter() - started_s

    def _medians(self, title: str, cells: Sequence[Callable[[], float]]) -> list[float]:
        """Measure all cells in turn, so that other load on the machine affects them equally."""
        times: list[list[float]] = [[] for _ in cells]
        turns = [*zip(cells, times, strict=True)] * self._options.repeats
        for cell, measured in track(turns, title, console=self._console):
            measured.append(cell())
        return [_rounded(median(measured)) for measured in times]


def _in_rows(values: Sequence[float], width: int) -> list[list[float]]:
    return [list(values[start : start + width]) for start in range(0, len(values), width)]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def _doubling(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return [*sizes, largest]
