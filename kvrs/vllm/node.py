"""Parts of the cluster in vLLM's process: clients of agents, and the own agent's link."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvrs.engines.place import EnginePlace, namespace_of
from kvrs.errors import ConfigError, KvrsError
from kvrs.protocol.rows import RegionInfo, params_key
from kvrs.transfer.rows.client import RegionLink, unlink_region
from kvrs.vllm import ledger, space
from kvrs.vllm.agents import KnownAgents


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: str
    instance: str
    # "asked": rows are looked up and protected for requests with `kvrs` in their params; "all": for
    # every request.
    requests: Literal["asked", "all"] = "asked"
    lookup_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.3
    load_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The clients of agents that rows are loaded from, the link to the own node's agent, and the
    engine's cache policy.
    """

    link: RegionLink
    policy: "ledger.KvrsPolicy"
    agents: KnownAgents
    serves_all: bool
    # Type (torch.dtype) of all numbers in a row; None: unknown, so rows are not compared.
    number_type: Any
    lookup_s: float
    load_s: float


def of_tier(spec: Any, options: dict[str, Any], rows: int, row_bytes: int) -> NodeParts:
    """Read the configuration, and prepare the link to the own node's agent and the clients of all
    agents.

    Raises:
        KvrsError: wrong options, or an engine whose rows cannot be shared.
        OSError: the memory region cannot be opened.
    """
    region = spec._scheduler_mmap
    if region._creator or os.fstat(region.fd).st_nlink != 1:
        raise KvrsError("the workers of this engine may have mapped another region")
    # Also for an engine that shares nothing, because a killed vLLM leaves the name of its memory
    # behind.
    unlink_region(Path(region.mmap_path), region.fd)
    given = _options(options)
    place = EnginePlace(given.config, given.instance)
    fields = space.fields_of(spec)
    tokens = spec.blocks_per_chunk * max(spec.tokens_per_block)
    name = space.served_name()
    info = RegionInfo(place.instance, namespace_of(fields), rows, row_bytes, fields, name, tokens)
    own, others = place.clients(info.space)
    policy = ledger.latest()
    if policy is None or policy.ledger is None or policy.ledger.rows != rows:
        raise KvrsError(
            "this engine has no ledger; allowed: eviction_policy KvrsPolicy and "
            "cache_policy_module_path kvrs.vllm.ledger beside this tier"
        )
    policy.ledger.describe(row_bytes)
    link = place.link(info, region.fd, policy.ledger, given.lookup_s)
    params_keys = [params_key(secret, place.instance) for secret in place.secrets]
    agents = KnownAgents(own, others, params_keys)
    return NodeParts(
        link,
        policy,
        agents,
        given.requests == "all",
        space.number_type(spec),
        given.lookup_s,
        given.load_s,
    )


def _options(given: dict[str, Any]) -> _Options:
    """Decode kvrs's options of the tier. Raises ConfigError: an option is wrong."""
    try:
        return msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config.kvrs: got {given!r:.200}; allowed: config (the cluster's "
            f"YAML), instance (an id in it), and if wanted requests, lookup_s and load_s ({error})"
        ) from None
