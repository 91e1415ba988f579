"""Clusters, settings, streams and deaths drawn at random: small enough that thousands of them run
in minutes.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from kvrs.config.backup import BackupMode, Placement
from kvrs.config.cluster import Planner, pipeline_nodes
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import Dispatch, Handoff, PolicyName
from kvrs.protocol.instance import Role
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.fault_scenarios import ONE_DEVICE, ONE_RANK, FaultEvent, random_deaths
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_testkit.death_scenarios import (
    DEATH_SCENARIOS,
    LATE,
    LEAVES,
    MID_MOVE,
    PROXY_KILLED,
    SICK,
    STAGE_SCENARIOS,
    TOO_MANY_RANKS,
    TWO_RANKS,
    named_death,
    scenarios_of,
)
from kvrs_testkit.disturbances import DisturbedWorld

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
_RANKS = (4, 1, 2, 1, 3, 1)  # Of every instance of a world, by its seed.
MAX_MODEL_LEN = 480
SPAN_S = 3.0  # Streams arrive in it, and deaths come.
KINDS = (*DEATH_SCENARIOS, SICK)  # Of `in_turn`.
FIRST_S, TURN_S = 2.0, 3.0  # When the first of them comes, and how long after it the next one.


def scenario(seed: int, *, keep_log: bool = False) -> World:
    """The world of that seed."""
    rng = Random(seed)
    return drawn_world(rng, random_config(rng, seed), seed, keep_log=keep_log)


def peers(seed: int, *, keep_log: bool = False) -> World:
    """The same with replicas at peers, where there are some."""
    rng = Random(seed)
    config = random_config(rng, seed, [each for each in CLUSTERS if len(each) > 1])
    backup = config.backup.model_copy(update={"mode": BackupMode.PEER})
    config = config.model_copy(update={"backup": backup})
    return drawn_world(rng, config, seed, keep_log=keep_log)


def drawn_world(rng: Random, config: Config, seed: int, *, keep_log: bool) -> World:
    """Streams and deaths at random."""
    streams = rng.randint(4, 24)
    arrivals = [_arrival(rng, config.cluster.engine.max_model_len) for _ in range(streams)]
    has_agents = config.backup.at_agents
    nodes = [str(node.id) for node in config.cluster.nodes]
    has_ranks = any(instance.ranks > 1 for _, instance in config.cluster.instances())
    proxies = rng.choice([1, 2, 2, 3])
    deaths = random_deaths(
        rng,
        rng.randint(0, 6),
        SPAN_S + 1.0,
        nodes,
        has_agents=has_agents,
        has_ranks=has_ranks,
        scenarios=scenarios_of(has_ranks=has_ranks, proxies=proxies),
    )
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return DisturbedWorld(
        config,
        arrivals,
        deaths,
        seed=seed,
        proxies=proxies,
        stay_away=rng.choice([0.0, 0.05, 0.3]),
        is_supervised=rng.random() < 0.5,
        keep_log=keep_log,
    )


def sick(seed: int, *, keep_log: bool = False) -> World:
    """Three pairs under steady load, one instance of which fails every call for some seconds."""
    rng = Random(seed)
    arrivals = _poisson(rng, per_s=20.0, from_s=1.0, to_s=41.0, max_tokens=5)
    death = FaultEvent(SICK, 1.0)
    return DisturbedWorld(_pairs(3, {}), arrivals, [death], seed=seed, proxies=1, keep_log=keep_log)


def ranked(
    seed: int, *, deaths: int = 6, planner: Planner = "on_demand", keep_log: bool = False
) -> World:
    """Decode instances of four ranks that lose some, again and again, while they serve; some
    leave by order.
    """
    rng = Random(seed)
    count = rng.choice([1, 2])
    nodes = [
        {
            "id": f"n{n}",
            "instances": [
                {"id": f"p{n}", "role": "prefill"},
                {"id": f"d{n}", "role": "decode", "tp": 4},
            ],
        }
        for n in range(count)
    ]
    backup = rng.choice([BackupMode.OFF, BackupMode.LOCAL])
    document = {
        "cluster": {"nodes": nodes},
        "backup": {"mode": backup.value},
        "elastic": {"planner": planner},
    }
    arrivals = _poisson(rng, per_s=4.0, from_s=1.0, to_s=11.0, max_tokens=100)
    names = [TWO_RANKS, MID_MOVE, LATE, ONE_RANK, ONE_DEVICE, LEAVES]
    drawn = [
        named_death(rng, name, rng.uniform(1.0, 12.0)) for name in rng.choices(names, k=deaths)
    ]
    drawn.sort(key=lambda death: death.at_s)
    return DisturbedWorld(
        parse_config(document),
        arrivals,
        drawn,
        seed=seed,
        proxies=2,
        stay_away=0.0,
        keep_log=keep_log,
    )


def pipelines(seed: int, *, deaths: int = 3, keep_log: bool = False) -> World:
    """Instances of a group, with a host for each stage, that lose some again and again."""
    rng = Random(seed)
    count, stages = rng.randint(2, 4), rng.randint(2, 4)
    nodes = [
        node.model_dump(mode="json", exclude_unset=True) for node in pipeline_nodes(count, stages)
    ]
    mode = rng.choice([BackupMode.OFF, BackupMode.REMOTE, BackupMode.PEER])
    document = {
        "cluster": {
            "engine": {
                "pages": rng.choice([80, 600]),
                "max_running": rng.choice([4, 32]),
                "max_model_len": MAX_MODEL_LEN,
            },
            "nodes": nodes,
        },
        "elastic": {
            # With the largest gain none lends.
            "least_gain": rng.choice([0.0, 0.1, 1.0]),
        },
    }
    config = parse_config(document)
    backup = config.backup.model_copy(update={"mode": mode})
    config = config.model_copy(update={"backup": backup})
    arrivals = _poisson(rng, per_s=6.0, from_s=0.5, to_s=12.5, max_tokens=60)
    names = [instance.id for _, instance in config.cluster.instances()]
    drawn = [
        named_death(rng, name, rng.uniform(1.0, 12.0), names)
        for name in rng.choices([*STAGE_SCENARIOS], k=deaths)
    ]
    drawn.sort(key=lambda death: death.at_s)
    return DisturbedWorld(
        config,
        arrivals,
        drawn,
        seed=seed,
        proxies=rng.choice([1, 2]),
        stay_away=0.0,
        keep_log=keep_log,
        pipeline_model=PipelineModel(
            load_s=rng.uniform(0.5, 4.0),
            session_s=rng.uniform(0.01, 0.3),
            computing_share=rng.choice([0.2, 1.0]),
        ),
    )


def contended(seed: int, *, keep_log: bool = False) -> World:
    """Three pairs with one slot each, of which three proxies want one at every death: of instances,
    one of which was only frozen, of agents that grant slots, and of a proxy.
    """
    rng = Random(seed)
    arrivals = [
        replace(asked, is_keyed=True)
        for asked in _poisson(rng, per_s=15.0, from_s=0.5, to_s=8.5, max_tokens=60)
    ]
    names = ["two decode instances at once", "decode frozen", "all agents", "decode", PROXY_KILLED]
    deaths = [
        named_death(rng, name, 1.5 * number + rng.uniform(1.5, 2.0))
        for number, name in enumerate(names)
    ]
    settings = {
        "policy": {"name": PolicyName.ALWAYS_MIGRATE.value, "slots_max": 1, "slot_lease_s": 2.0},
        "backup": {"mode": BackupMode.BOTH.value},
    }
    config = _pairs(3, {}, settings)
    return DisturbedWorld(config, arrivals, deaths, seed=seed, proxies=3, keep_log=keep_log)


def too_few_ranks(seed: int) -> World:
    """Two decode instances of four ranks, of which one comes to have too few for its model."""
    rng = Random(seed)
    nodes = [
        {
            "id": f"n{n}",
            "instances": [
                {"id": f"p{n}", "role": "prefill"},
                {"id": f"d{n}", "role": "decode", "tp": 4},
            ],
        }
        for n in range(2)
    ]
    arrivals = _poisson(rng, per_s=4.0, from_s=1.0, to_s=6.0, max_tokens=100)
    death = named_death(rng, TOO_MANY_RANKS, rng.uniform(2.0, 5.0))
    config = parse_config({"cluster": {"nodes": nodes}})
    return DisturbedWorld(config, arrivals, [death], seed=seed, proxies=1, stay_away=0.0)


def avalanche(seed: int, *, keep_log: bool = False) -> World:
    """Four pairs just below saturation, whose decode instances answer 503 beyond a few streams; the
    busiest one is killed.
    """
    rng = Random(seed)
    config = _pairs(4, {"engine": {"max_running": 8}})
    arrivals = _poisson(rng, per_s=14.0, from_s=1.0, to_s=41.0, max_tokens=100)
    kill = {
        "when": {"at_s": 15.0},
        "what": "kill",
        "whom": {"role": "decode", "pick": "busiest"},
    }
    death = FaultEvent("the busiest decode instance", 15.0, tuple(parse_faults([kill])))
    world = DisturbedWorld(config, arrivals, [death], seed=seed, proxies=1, keep_log=keep_log)
    for engine in world.cluster.engines.values():
        engine.most_calls = 10 if engine.role is Role.DECODE else None
    return world


def poisoned(seed: int, *, keep_log: bool = False) -> World:
    """Six pairs under steady load, and three requests that end every decode instance they get."""
    rng = Random(seed)
    arrivals = _poisson(rng, per_s=10.0, from_s=1.0, to_s=16.0, max_tokens=40)
    arrivals += [
        replace(asked, at_s=at_s, is_poison=True)
        for asked, at_s in zip(arrivals[:3], (4.0, 4.0, rng.uniform(4.0, 12.0)), strict=True)
    ]
    arrivals.sort(key=lambda asked: asked.at_s)
    return DisturbedWorld(_pairs(6, {}), arrivals, [], seed=seed, proxies=1, keep_log=keep_log)


def outage(
    seed: int,
    spread_s: float,
    *,
    both: bool = False,
    poison_deaths: int = 3,
    is_supervised: bool = False,
    keep_log: bool = False,
) -> World:
    """Eight instances under load, four of which are killed within `spread_s`: four pairs, or eight
    that do both stages. No request caused it, and all agents live on.
    """
    rng = Random(seed)
    config = (_both if both else _pairs)(8 if both else 4, {}, _refusing(poison_deaths))
    arrivals = _poisson(rng, per_s=40.0, from_s=1.0, to_s=6.0, max_tokens=40)
    names = [instance.id for _, instance in config.cluster.instances()]
    deaths = [_killed(name, 3.0 + rng.uniform(0.0, spread_s)) for name in rng.sample(names, 4)]
    deaths.sort(key=lambda death: death.at_s)
    return DisturbedWorld(
        config,
        arrivals,
        deaths,
        seed=seed,
        proxies=1,
        is_supervised=is_supervised,
        keep_log=keep_log,
    )


def _killed(name: str, at_s: float) -> FaultEvent:
    row = {"when": {"at_s": at_s}, "what": "kill", "whom": {"id": name}}
    return FaultEvent(f"{name} killed", at_s, tuple(parse_faults([row])))


def poisons_at_once(
    seed: int,
    pairs: int,
    per_s: float = 10.0,
    *,
    poison_deaths: int = 3,
    load_interval_s: float = 0.25,
    stay_away: float = 0.1,
    is_supervised: bool = False,
    keep_log: bool = False,
) -> World:
    """Pairs under load, and three requests within 10 ms that end every decode instance they get,
    beside ten others of the same moment. Reports come `load_interval_s` apart, some of them late by
    as much.
    """
    rng = Random(seed)
    arrivals = _poisson(rng, per_s=per_s, from_s=1.0, to_s=9.0, max_tokens=40)
    beside = _poisson(rng, per_s=1300.0, from_s=4.0, to_s=4.01, max_tokens=40)
    poisons = rng.sample(range(len(beside)), 3)
    arrivals += [replace(asked, is_poison=n in poisons) for n, asked in enumerate(beside)]
    arrivals.sort(key=lambda asked: asked.at_s)
    settings = _refusing(poison_deaths) | {"proxy": {"load_interval_s": load_interval_s}}
    return DisturbedWorld(
        _pairs(pairs, {}, settings),
        arrivals,
        [],
        seed=seed,
        proxies=1,
        stay_away=stay_away,
        is_supervised=is_supervised,
        keep_log=keep_log,
    )


def _refusing(poison_deaths: int) -> dict[str, Any]:
    return {"policy": {"recovery": {"poison_deaths": poison_deaths}}}


def in_turn(seed: int, *, keep_log: bool = False) -> World:
    """Every kind of death and fault, one after the other in random order, while three proxies have
    streams at three pairs, two of which have ranks. Some last until the next ones have come.
    """
    rng = Random(seed)
    names = rng.sample(KINDS, len(KINDS))
    nodes = ["n0", "n1", "n2"]
    deaths = [
        named_death(rng, name, FIRST_S + TURN_S * (turn + rng.uniform(0.0, 0.5)), nodes)
        for turn, name in enumerate(names)
    ]
    deaths.sort(key=lambda death: death.at_s)
    to_s = FIRST_S + TURN_S * (len(names) + 2)
    arrivals = [
        replace(asked, is_keyed=True, is_text=rng.random() < 0.3)
        for asked in _poisson(rng, per_s=4.0, from_s=0.5, to_s=to_s, max_tokens=60)
    ]
    tp = rng.sample([4, 4, 1], 3)
    name = PolicyName.AUTO if rng.random() < 0.5 else rng.choice(list(PolicyName))
    document = {
        "proxy": {"token_gap_s": 3.0},
        "cluster": {
            "nodes": [
                {
                    "id": node,
                    "instances": [
                        {"id": f"p{n}", "role": "prefill"},
                        {"id": f"d{n}", "role": "decode", "tp": tp[n]},
                    ],
                }
                for n, node in enumerate(nodes)
            ]
        },
        "gossip": {"enabled": True},
        "policy": {"name": name.value, "slots_max": 4, "handoff": Handoff.AUTO.value},
        "backup": {"mode": BackupMode.BOTH.value, "capacity_bytes": 4000 * PAGE_BYTES},
    }
    return DisturbedWorld(
        parse_config(document),
        arrivals,
        deaths,
        seed=seed,
        proxies=3,
        stay_away=0.0,
        keep_log=keep_log,
    )


def _pairs(count: int, cluster: dict[str, Any], sections: dict[str, Any] | None = None) -> Config:
    nodes = [
        {
            "id": f"n{n}",
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(count)
    ]
    return parse_config({"cluster": {"nodes": nodes} | cluster} | (sections or {}))


def _both(count: int, cluster: dict[str, Any], sections: dict[str, Any]) -> Config:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"b{n}", "role": "both"}]} for n in range(count)]
    return parse_config({"cluster": {"nodes": nodes} | cluster} | sections)


def _poisson(
    rng: Random, *, per_s: float, from_s: float, to_s: float, max_tokens: int
) -> list[Arrival]:
    """So many in all that the mean rate is `per_s`."""
    count = int(per_s * (to_s - from_s))
    times_s = sorted(rng.uniform(from_s, to_s) for _ in range(count))
    return [
        Arrival(
            at_s,
            tuple(rng.choices(range(50_000), k=20)),
            max_tokens,
            is_text=False,
            is_keyed=False,
        )
        for at_s in times_s
    ]


def random_config(
    rng: Random, seed: int, clusters: Sequence[tuple[tuple[str, ...], ...]] = CLUSTERS
) -> Config:
    cluster, ranks = rng.choice(clusters), _RANKS[seed % len(_RANKS)]
    modes = [BackupMode.OFF, BackupMode.LOCAL]
    if len(cluster) > 1:
        modes += [BackupMode.REMOTE, BackupMode.BOTH]
    name = PolicyName.AUTO if rng.random() < 0.5 else rng.choice(list(PolicyName))
    document: dict[str, Any] = {
        "proxy": {
            "load_interval_s": rng.choice([0.1, 0.25, 1.0]),
            "token_gap_s": rng.choice([2.0, 10.0]),
        },
        "cluster": {
            "engine": {
                "page_size_tokens": PAGE_TOKENS,
                "pages": rng.choice([40, 120, 600]),
                "max_running": rng.choice([2, 8, 64]),
                "max_batch_tokens": rng.choice([64, 256]),
                "max_model_len": MAX_MODEL_LEN,
            },
            "nodes": [
                {
                    "id": f"n{index}",
                    "instances": [
                        {"id": f"{role[0]}{index}{letter}", "role": role, "tp": ranks}
                        for role, letter in zip(roles, "abc", strict=False)
                    ],
                }
                for index, roles in enumerate(cluster)
            ],
        },
        "gossip": {"enabled": rng.random() < 0.5},
    }
    # A seed draws the worlds that it drew when there were two settings more.
    rng.choice(range(2))
    handoff, dispatch = rng.choice(list(Handoff)), rng.choice(list(Dispatch))
    rng.choice(range(2))
    document |= {
        "policy": {
            "name": name.value,
            "handoff": handoff.value,
            "dispatch": dispatch.value,
            "slots_max": rng.choice([1, 2, 4, 32]),
            "slot_lease_s": rng.choice([0.3, 2.0, 30.0]),
            "assumed_link_bytes_per_s": rng.choice([3e8, 1.25e9, 1e10]),
            "recovery": {
                "wait_s": rng.choice([0.5, 10.0, 30.0]),
                "gather_s": rng.choice([0.0, 0.01, 0.3]),
                "max_attempts": rng.choice([3, 8, 30]),
            },
        },
        "slo": {
            "abort": rng.random() < 0.25,
            "recovery_gap_s": rng.choice([1.0, 10.0]),
            "ttft_s": rng.choice([None, 4.0]),
        },
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
    return Arrival(
        rng.uniform(0.0, SPAN_S),
        prompt,
        rng.randint(1, min(60, max_model_len - len(prompt))),
        is_text=rng.random() < 0.3,
        is_keyed=rng.random() < 0.7,
    )
