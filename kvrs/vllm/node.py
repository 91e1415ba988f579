"""The parts of the cluster that vLLM's process uses: agents, and its link to that of its node."""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvrs.config.file import load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.row_params import params_key
from kvrs.protocol.rows import RegionInfo, RowTags
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.dialling import dial_first, dial_tcp
from kvrs.transfer.rows.link import RegionLink, unlink_region
from kvrs.transfer.store.directory import row_directory
from kvrs.vllm import ledger, space
from kvrs.vllm.agents import KnownAgents


class _Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: str
    instance: str
    # Requests whose rows are looked up and protected: those with `kvrs` in their params, or all.
    requests: Literal["asked", "all"] = "asked"
    lookup_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.3
    load_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0


@dataclass(frozen=True, slots=True)
class NodeParts:
    """KnownAgents to load from, the link to the own one, and the engine's cache policy."""

    link: RegionLink
    policy: "ledger.KvrsPolicy"
    agents: KnownAgents
    serves_all: bool
    number_type: Any  # Of a row, as torch has it; None: rows cannot be compared.
    lookup_s: float
    load_s: float


def of_tier(spec: Any, options: dict[str, Any], rows: int, row_bytes: int) -> NodeParts:
    """Read the configuration, and prepare the link and the clients.

    Raises:
        KvrsError: the options are wrong, or rows of this engine cannot be shared.
        OSError: its region cannot be opened.
    """
    region = spec._scheduler_mmap
    if region._creator or os.fstat(region.fd).st_nlink != 1:
        raise KvrsError("the workers of this engine may have mapped another region")
    # An engine that shares nothing does so too: vLLM itself leaves the name behind at a kill.
    unlink_region(Path(region.mmap_path), region.fd)
    given = _options(options)
    config = load_config(Path(given.config), os.environ)
    instance = InstanceId(given.instance)
    nodes = {each.id: node for node, each in config.cluster.instances()}
    if (own := nodes.get(instance)) is None:
        raise ConfigError(
            f"kv_connector_extra_config.kvrs.instance: {instance!r}; allowed: {', '.join(nodes)}"
        )
    secrets = read_secrets(config.security, os.environ)
    fields = space.fields_of(spec)
    namespace = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
    tokens = spec.blocks_per_chunk * max(spec.tokens_per_block)
    name = space.served_name()
    info = RegionInfo(instance, namespace, rows, row_bytes, fields, name, tokens)
    tags = RowTags(secrets)
    directories = [row_directory(config.backup.directory, secret, own.id) for secret in secrets]
    dials: dict[InstanceId, Callable[[float], socket.socket]] = {
        node.agent_id: partial(dial_tcp, node.agent.host, node.agent.row_port)
        for node in config.cluster.nodes
        if node.agent.row_port is not None
    }
    dials[own.agent_id] = partial(dial_first, directories)
    keys = {agent: scoped_key(secrets[0], Scope.ROWS, agent) for agent in dials}
    clients = {
        str(agent): RowClient(
            agent, dial, keys[agent], info.space, tags, is_local=agent == own.agent_id
        )
        for agent, dial in dials.items()
    }
    policy = ledger.latest()
    if policy is None or policy.ledger is None or policy.ledger.rows != rows:
        raise KvrsError(
            "this engine has no ledger; allowed: eviction_policy KvrsPolicy and "
            "cache_policy_module_path kvrs.vllm.ledger beside this tier"
        )
    policy.ledger.describe(row_bytes)
    link = RegionLink(
        info,
        region.fd,
        policy.ledger,
        partial(dial_first, directories, given.lookup_s),
        keys[own.agent_id],
    )
    params_keys = [params_key(secret, instance) for secret in secrets]
    agents = KnownAgents(clients.pop(own.agent_id), clients, params_keys)
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
    """Raises ConfigError."""
    try:
        return msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config.kvrs: got {given!r:.200}; allowed: config (the cluster's "
            f"YAML), instance (an id in it), and if wanted requests, lookup_s and load_s ({error})"
        ) from None
