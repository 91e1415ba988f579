"""Addresses of pods in lists and watches of the Kubernetes API. Pure."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

Pod = Mapping[str, Any]  # A pod of the API, as JSON.

_OVER = ("Succeeded", "Failed")


def address_of(pod: Pod) -> str | None:
    """Numeric address of a pod that may serve; None: no address yet, or the pod is about to end."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in _OVER:
        return None
    try:
        return str(ipaddress.ip_address(status.get("podIP", "")))
    except ValueError:
        return None


class PodAddresses:
    """Pods by uid: a replacement has its predecessor's name, and may appear before that is gone."""

    def __init__(self) -> None:
        self._of: dict[str, str | None] = {}

    @property
    def all(self) -> frozenset[str]:
        return frozenset(address for address in self._of.values() if address is not None)

    def replace(self, pods: Iterable[Pod]) -> None:
        """Replace all pods by a complete list."""
        self._of = {pod["metadata"]["uid"]: address_of(pod) for pod in pods}

    def take(self, kind: str, pod: Pod) -> None:
        """Apply a watch's event: ADDED, MODIFIED or DELETED; other kinds do not concern pods."""
        name = pod["metadata"].get("uid")
        if kind == "DELETED":
            self._of.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._of[name] = address_of(pod)
