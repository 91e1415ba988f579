"""Instances found by the addresses of host names: `cluster.services`. Pure.

Found addresses are added to `cluster.nodes` of the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvrs.config.cluster import ServiceSettings

Nodes = list[dict[str, Any]]  # `cluster.nodes` in plain data, with all keys.
Found = Mapping[str, frozenset[str]]  # Numeric addresses by id of the service.


def with_services(nodes: Nodes, services: Sequence[ServiceSettings], found: Found) -> Nodes:
    """The nodes of a file plus the nodes of the addresses; the file's own instances stay unchanged,
    even at a found address.
    """
    named = {(each["host"], each["port"]) for node in nodes for each in node["instances"]}
    added = [
        service.node(address).model_dump(mode="json")
        for service in services
        for address in sorted(found.get(service.id, ()))
        if (address, service.port) not in named
    ]
    return [*nodes, *added]


def newer(held: Found, services: Sequence[ServiceSettings], answers: Found) -> Found:
    """Addresses after a look-up: a name that resolves to no address keeps its former ones."""
    kept = {each.id: answers.get(each.id) or held.get(each.id) for each in services}
    return {name: addresses for name, addresses in kept.items() if addresses}


def single_changes(held: Found, wanted: Found) -> Iterator[tuple[str, str]]:
    """Service and address of all added addresses, then of all removed ones."""
    none: frozenset[str] = frozenset()
    for first, second in ((wanted, held), (held, wanted)):
        for name in wanted:
            for address in sorted(first.get(name, none) - second.get(name, none)):
                yield name, address


def changed(held: Found, service: str, address: str) -> Found:
    """A copy with this address added, or removed if it was present."""
    return {**held, service: held.get(service, frozenset()) ^ {address}}
