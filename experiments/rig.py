"""Common parts of experiments with real engines: sessions, prompts, figures of rounds in turns."""

import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from kvrs.net.proving import ProvingConnector, agent_keys, instance_keys
from kvrs.protocol.secrets import Scope
from kvrs_testkit.processes import Processes

VOCAB_SIZE = 512
FIRST_ORDINARY_TOKEN = 4


def session_for(processes: Processes, door: Scope = Scope.INSTANCE) -> aiohttp.ClientSession:
    """Proves one door of each instance, and that of each agent."""
    secret, cluster = processes.secret, processes.config.cluster
    instances = [instance for _, instance in cluster.instances()]
    keys = {**agent_keys(secret, cluster.nodes), **instance_keys(secret, instances, door)}
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(connector=ProvingConnector(keys), timeout=timeout)


def draw(rng: random.Random, count: int) -> list[int]:
    """That many ordinary tokens."""
    return [rng.randrange(FIRST_ORDINARY_TOKEN, VOCAB_SIZE) for _ in range(count)]


def interval(samples: Sequence[float]) -> float:
    """Half of the 95 % interval of the median, by a seeded bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(samples, k=len(samples))) for _ in range(1000))
    return (medians[974] - medians[25]) / 2


def paired(off: Sequence[float], on: Sequence[float]) -> tuple[float, float]:
    """Median of the rounds' ratios less one, and half of its 95 % interval."""
    ratios = [b / a - 1 for a, b in zip(off, on, strict=True)]
    return statistics.median(ratios), interval(ratios)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def process_cpu_s(pid: int) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
