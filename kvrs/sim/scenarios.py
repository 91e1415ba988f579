"""Clusters, settings, streams and deaths drawn at random: small enough that thousands of them run in minutes."""

from random import Random
from typing import Any

from kvrs.agent.config import BackupMode, Placement
from kvrs.config import Config, parse_config
from kvrs.policy.config import Dispatch, Handoff, PolicyName
from kvrs.sim.deaths import random_deaths
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World

PAGE_TOKENS = 16
PAGE_BYTES = 819_200 * PAGE_TOKENS  # Of OPT-13B, whose clock they keep.
CLUSTERS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("prefill", "decode"), ("prefill", "decode")),
    (("prefill", "decode"), ("prefill", "decode"), ("prefill", "decode")),
    (("prefill",), ("decode", "decode"), ("decode",)),
    (("both",), ("both",)),
    (("prefill", "both"), ("decode",)),
    (("prefill", "decode"),),
)
SPAN_S = 3.0  # Streams arrive in it, and deaths come.


def scenario(seed: int, *, keep_log: bool = False) -> World:
    """The world of that seed."""
    rng = Random(seed)
    config = _config(rng)
    streams = rng.randint(4, 24)
    arrivals = [_arrival(rng, config.cluster.engine.max_model_len) for _ in range(streams)]
    has_agents = config.backup.mode is not BackupMode.OFF
    nodes = [str(node.id) for node in config.cluster.nodes]
    deaths = random_deaths(rng, rng.randint(0, 6), SPAN_S + 1.0, nodes, has_agents=has_agents)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    proxies = rng.choice([1, 1, 2, 3])
    return World(config, arrivals, deaths, seed=seed, proxies=proxies, stay_away=rng.choice([0.0, 0.05, 0.3]), keep_log=keep_log)


def _config(rng: Random) -> Config:
    cluster = rng.choice(CLUSTERS)
    modes = list(BackupMode) if len(cluster) > 1 else [BackupMode.OFF, BackupMode.LOCAL]
    name = PolicyName.AUTO if rng.random() < 0.5 else rng.choice(list(PolicyName))
    document: dict[str, Any] = {
        "proxy": {"load_interval_s": rng.choice([0.1, 0.25, 1.0]), "token_gap_s": rng.choice([2.0, 10.0])},
        "cluster": {
            "engine": {
                "page_size_tokens": PAGE_TOKENS,
                "pages": rng.choice([40, 120, 600]),
                "max_running": rng.choice([2, 8, 64]),
                "max_batch_tokens": rng.choice([64, 256]),
                "max_model_len": 480,
            },
            "nodes": [
                {
                    "id": f"n{index}",
                    "instances": [
                        {"id": f"{role[0]}{index}{letter}", "role": role} for role, letter in zip(roles, "abc", strict=False)
                    ],
                }
                for index, roles in enumerate(cluster)
            ],
        },
        "policy": {
            "name": name.value,
            "handoff": rng.choice(list(Handoff)).value,
            "dispatch": rng.choice(list(Dispatch)).value,
            "correction_max": rng.choice([1.0, 4.0]),
            "slots_max": rng.choice([1, 2, 4, 32]),
            "slot_lease_s": rng.choice([0.3, 2.0, 30.0]),
            "assumed_link_bytes_per_s": rng.choice([3e8, 1.25e9, 1e10]),
            "recovery": {
                "wait_s": rng.choice([0.5, 10.0, 30.0]),
                "gather_s": rng.choice([0.0, 0.01, 0.3]),
                "max_attempts": rng.choice([3, 8, 30]),
            },
        },
        "slo": {"abort": rng.random() < 0.25, "recovery_gap_s": rng.choice([1.0, 10.0]), "ttft_s": rng.choice([None, 4.0])},
        "transfer": {
            "link_bytes_per_s": 10 ** rng.uniform(8.3, 10.5),
            "lease_s": rng.choice([1.5, 5.0]),
            "stall_timeout_s": rng.choice([0.5, 2.0]),
        },
        "backup": {
            "mode": rng.choice(modes).value,
            "placement": rng.choice(list(Placement)).value,
            "capacity_bytes": rng.choice([30, 200, 4000]) * PAGE_BYTES,
            "staging_pages": rng.choice([4, 64]),
        },
    }
    return parse_config(document)


def _arrival(rng: Random, max_model_len: int) -> Arrival:
    # Half of them begin alike, so that pages are shared.
    shared = [7] * rng.choice([16, 64, 100]) if rng.random() < 0.5 else []
    own = [rng.randrange(50_000) for _ in range(min(int(rng.lognormvariate(4.2, 0.9)) + 1, 350))]
    prompt = tuple([*shared, *own][:400])
    return Arrival(rng.uniform(0.0, SPAN_S), prompt, rng.randint(1, min(60, max_model_len - len(prompt))), rng.random() < 0.3)
