"""The prefill table of an instance, measured at its start and saved beside the model for the same
machine. Only a measurement without other load on the processor is saved.
"""

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import MeasuredPrefill
from kvrs_engine.engine.models.digests import write_whole
from kvrs_engine.engine.worker import ModelWorker, Worker
from kvrs_engine.scheduling.sequences import Chunk

# A few lengths, in well under a second on a small model.
WARM_UP_REPEATS = 3
WARM_UP_LONGEST_TOKENS = 1024
# A length that takes longer is measured once: disturbances are a small part of the time.
_LONG_ENOUGH_S = 1.0

NOTE_NAME = ".kvrs-prefill.json"
_VERSION = 2  # Version of the method of measurement.
# Limit of saved tables: many machines may share the directory of a model.
_MAX_NOTED = 64
# Largest ratio of wall time to processor time of a measurement that is saved.
_UNDISTURBED = 1.25


def prefill_table(worker: ModelWorker, max_model_len: int, directory: Path) -> PrefillTable:
    """Return the prefill table: the saved one if it is of the same machine, model and settings,
    else measured now, and saved if nothing disturbed the measurement.
    """
    # Longer prompts are not measured.
    longest = min(_longest(worker, max_model_len), WARM_UP_LONGEST_TOKENS)
    # The processor time is known only for a computation in this process.
    if not isinstance(worker, Worker) or worker.settings.device != "cpu":
        return measure_prefill(worker, max_model_len)
    note = _Note(directory, _key(worker, longest))
    if (noted := note.read()) is not None:
        return noted
    started_s, worked_s = time.perf_counter(), time.thread_time()
    table = measure_prefill(worker, max_model_len)
    took_s, worked_s = time.perf_counter() - started_s, time.thread_time() - worked_s
    if took_s <= _UNDISTURBED * worked_s:
        note.write(table)
    return table


def measure_prefill(worker: ModelWorker, max_model_len: int) -> PrefillTable:
    """Measure prefill of a few lengths on this machine, before any page is in use.

    For a length of several steps all overheads but one are subtracted, as in every table.
    """
    chunk_tokens = worker.settings.max_batch_tokens
    times: dict[int, float] = {}
    for at, tokens in warm_up_lengths(_longest(worker, max_model_len)).items():
        taken_s = median_of_repeats(partial(prefill_s, worker, tokens))
        overhead_s = times.get(0, taken_s)
        more_steps = -(-tokens // chunk_tokens) - 1
        times[at] = max(overhead_s, taken_s - more_steps * overhead_s)
    return PrefillTable.from_points(
        f"measured at start on {worker.settings.device}", "this instance", times
    )


def median_of_repeats(measure: Callable[[], float]) -> float:
    taken: list[float] = []
    while len(taken) < WARM_UP_REPEATS and sum(taken) < _LONG_ENOUGH_S:
        taken.append(measure())
    return statistics.median(taken)


def warm_up_lengths(longest_tokens: int) -> dict[int, int]:
    """Return the number of measured tokens by point of the prefill table.

    The point of zero tokens, the overhead of a step, is measured with one token, which also warms
    the engine up.
    """
    step = max(1, min(longest_tokens, WARM_UP_LONGEST_TOKENS) // 8)
    return {0: 1} | {times * step: times * step for times in (1, 2, 4, 8)}


def _longest(worker: ModelWorker, max_model_len: int) -> int:
    return min(max_model_len, worker.settings.pages * worker.geometry.page_size_tokens)


def prefill_s(worker: ModelWorker, tokens: int, cached: int = 0) -> float:
    """Measure a prefill of `tokens` tokens, of which the first `cached` are not computed."""
    size, step = worker.geometry.page_size_tokens, worker.settings.max_batch_tokens
    pages = range(-(-tokens // size))
    chunks = [
        Chunk(
            token_ids=any_ids(worker, min(step, tokens - first)),
            first_position=first,
            pages=pages,
            logits=int(first + step >= tokens),
        )
        for first in range(cached, tokens, step)
    ]
    started_s = time.perf_counter()
    for chunk in chunks:
        worker.execute([chunk])
    return time.perf_counter() - started_s


def any_ids(worker: ModelWorker, count: int) -> list[int]:
    return [1 + place % (worker.vocab_size - 1) for place in range(count)]


def _key(worker: Worker, longest_tokens: int) -> str:
    """Return a key of all that determines the time of prefill: machine, arithmetic, release of
    torch, and the shape and the units of the model.
    """
    facts = [
        *(_VERSION, platform.node(), processor(), os.cpu_count(), torch.get_num_threads()),
        *(worker.fingerprint, worker.settings.max_batch_tokens, longest_tokens),
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


class _Note:
    """One saved table in a file of a model's directory."""

    def __init__(self, directory: Path, key: str) -> None:
        self._path, self._key = directory / NOTE_NAME, key

    def read(self) -> PrefillTable | None:
        """Return the saved table; None: there is none, or it is invalid."""
        if (entry := self._all().get(self._key)) is None:
            return None
        try:
            found = msgspec.json.decode(entry, type=MeasuredPrefill)
        except msgspec.DecodeError:
            return None
        return PrefillTable.from_measured(found) if len(found.seconds) > 1 else None

    def write(self, table: PrefillTable) -> None:
        """Save the table atomically; nothing happens if the directory is not writable."""
        measured = MeasuredPrefill(table.label, table.step_tokens, list(table.seconds))
        entries = self._all() | {self._key: msgspec.Raw(msgspec.json.encode(measured))}
        newest = dict(list(entries.items())[-_MAX_NOTED:])
        write_whole(self._path, msgspec.json.encode(newest))

    def _all(self) -> dict[str, msgspec.Raw]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, msgspec.DecodeError):
            return {}
