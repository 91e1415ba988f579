"""The fleet as the processes of a run know it: those that it began with, and those that were added
at a proxy since. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrs.config.file import Config, parse_config

Nodes = Sequence[Mapping[str, Any]]  # `cluster.nodes` in plain data, with all keys.


def with_added(config: Config, nodes: Nodes) -> Config:
    """The configuration with the instances and nodes that `nodes` have beside its own. Its own ones
    stay as they are: their processes go on until the end of the run.

    Raises:
        ConfigError: together they have faults.
    """
    document = config.model_dump(mode="json")
    own = {node["id"]: node for node in document["cluster"]["nodes"]}
    ids = {instance["id"] for node in own.values() for instance in node["instances"]}
    is_changed = False
    for node in nodes:
        added = [dict(instance) for instance in node["instances"] if instance["id"] not in ids]
        if not added:
            continue
        is_changed = True
        if node["id"] in own:
            own[node["id"]]["instances"] += added
        else:
            document["cluster"]["nodes"].append({**node, "instances": added})
    return parse_config(document) if is_changed else config
