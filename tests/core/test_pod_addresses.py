"""Addresses of pods by the events of a watch."""

from typing import Any

import pytest

from kvrs.core.fleet.pods import PodAddresses, address_of


def pod(uid: str, address: str = "", phase: str = "Running", **metadata: str) -> dict[str, Any]:
    return {"metadata": {"uid": uid} | metadata, "status": {"phase": phase, "podIP": address}}


@pytest.mark.parametrize(
    ("one", "address"),
    [
        (pod("a", "10.0.0.7"), "10.0.0.7"),
        (pod("a", "fd00::0:7"), "fd00::7"),
        (pod("a", "10.0.0.7", "Pending"), "10.0.0.7"),  # Its port will listen.
        (pod("a", "10.0.0.7", "Failed"), None),
        (pod("a", "10.0.0.7", "Succeeded"), None),
        (pod("a", "10.0.0.7", deletionTimestamp="2026-01-01T00:00:00Z"), None),
        (pod("a"), None),
        ({"metadata": {"uid": "a"}}, None),
    ],
)
def test_a_pod_counts_from_its_address_to_the_order_to_end(
    one: dict[str, Any], address: str | None
) -> None:
    """So it is drained while it still runs."""
    assert address_of(one) == address


def test_events_change_a_list_and_a_list_replaces_all() -> None:
    """A pod of the same name is another one; a bookmark says nothing of pods."""
    addresses = PodAddresses()

    addresses.replace([pod("a", "10.0.0.1"), pod("b")])
    assert addresses.all == {"10.0.0.1"}
    addresses.take("MODIFIED", pod("b", "10.0.0.2"))
    addresses.take("ADDED", pod("c", "10.0.0.3"))
    addresses.take("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    assert addresses.all == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
    addresses.take("DELETED", pod("a", "10.0.0.1"))
    addresses.take("DELETED", pod("x", "10.0.0.2"))
    assert addresses.all == {"10.0.0.2", "10.0.0.3"}
    addresses.replace([])
    assert addresses.all == frozenset()
