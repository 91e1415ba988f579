"""Addresses of pods, as lists and watches of the Kubernetes API have them. Pure."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

Pod = Mapping[str, Any]  # Of the API, as JSON.

_OVER = ("Succeeded", "Failed")


def address_of(pod: Pod) -> str | None:
    """The numeric address of a pod that may serve; None: it has none yet, or is about to end."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in _OVER:
        return None
    try:
        return str(ipaddress.ip_address(status.get("podIP", "")))
    except ValueError:
        return None


class PodAddresses:
    """Pods by uid: a pod that is replaced has the name of the one before, and may come first."""

    def __init__(self) -> None:
        self._of: dict[str, str | None] = {}

    @property
    def all(self) -> frozenset[str]:
        return frozenset(address for address in self._of.values() if address is not None)

    def replace(self, pods: Iterable[Pod]) -> None:
        """Take over a list, which has all there are."""
        self._of = {pod["metadata"]["uid"]: address_of(pod) for pod in pods}

    def take(self, kind: str, pod: Pod) -> None:
        """Take over an event of a watch: ADDED, MODIFIED or DELETED; others say nothing of pods."""
        name = pod["metadata"].get("uid")
        if kind == "DELETED":
            self._of.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._of[name] = address_of(pod)
