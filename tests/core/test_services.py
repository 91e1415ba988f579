"""Instances that are addresses of host names."""

import pytest
from pydantic import ValidationError

from kvrs.config.cluster import (
    InstanceSettings,
    Nodes,
    NodeSettings,
    ServiceSettings,
    changed,
    newer,
    single_changes,
    with_services,
)
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role

DECODE = ServiceSettings(id="decode", host="decode.test", port=8000, role=Role.DECODE)
OWN = InstanceSettings(id=InstanceId("d0"), role=Role.DECODE, host="10.0.0.1", port=8000)
FILE: Nodes = [NodeSettings(id=NodeId("n0"), instances=[OWN]).model_dump(mode="json")]
LONGEST = "2001:1db8:1111:2222:3333:4444:5555:6666"


def _names(nodes: Nodes) -> list[str]:
    return [row["id"] for node in nodes for row in node["instances"]]


def test_each_address_is_an_instance_on_a_node_of_its_own() -> None:
    """Instances of the file stay as they are, even at an address of the name."""
    found = {"decode": frozenset(("10.0.0.3", "fd00::2", "10.0.0.1"))}

    own, *added = with_services(FILE, [DECODE], found)

    assert own == FILE[0]
    assert [node["id"] for node in added] == ["decode-10.0.0.3", "decode-fd00--2"]
    assert _names(added) == ["decode-10.0.0.3", "decode-fd00--2"]
    nodes = [NodeSettings.model_validate(node) for node in added]
    urls = [(each.url, each.role) for node in nodes for each in node.instances]
    assert urls == [
        ("http://10.0.0.3:8000", Role.DECODE),
        ("http://[fd00::2]:8000", Role.DECODE),
    ]


def test_the_longest_names_make_ids_that_are_allowed() -> None:
    longest = ServiceSettings(id="s" * 24, host="decode.test", port=8000, role=Role.DECODE)

    assert len(longest.node(LONGEST).id) == 64
    with pytest.raises(ValidationError):
        ServiceSettings(id="s" * 25, host="decode.test", port=8000, role=Role.DECODE)


def test_a_name_without_an_answer_keeps_its_addresses() -> None:
    """One that is no longer in the file does not."""
    held = {"decode": frozenset(("10.0.0.3",)), "former": frozenset(("10.0.0.4",))}

    assert newer(held, [DECODE], {"decode": frozenset()}) == {"decode": held["decode"]}
    assert newer({}, [DECODE], {"decode": frozenset()}) == {}
    other = {"decode": frozenset(("10.0.0.5",))}
    assert newer(held, [DECODE], other) == other


def test_changes_one_by_one_add_before_they_remove() -> None:
    held, wanted = {"decode": frozenset("ab")}, {"decode": frozenset("bc"), "more": frozenset("d")}

    steps = [*single_changes(held, wanted)]

    assert steps == [("decode", "c"), ("more", "d"), ("decode", "a")]
    found = held
    for service, address in steps:
        found = {**changed(found, service, address)}
    assert found == wanted
