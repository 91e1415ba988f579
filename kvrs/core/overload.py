"""Admission of new requests by their predicted wait: load is shed before the engines drown.

A request is refused where the wait in the queues of its prefill and its decode instance passes the
bound, or makes it miss a deadline that it would keep on an idle cluster. A queue of half the bound
is open to all. Beyond that each client that has work in the queues gets an equal share of them, so
that one that asks for more is refused before the others are.

Streams that have begun are never refused here, nor are requests that were taken: their next attempt
is a recovery. All of it takes a fixed number of operations while the queues are short.
"""

import msgspec

from kvrs.config.policy import AdmissionSettings
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.streams import Decision, Stream
from kvrs.core.routing import computing_prompts


class LoadRefusal(msgspec.Struct, frozen=True):
    reason: act.Reason
    message: str
    retry_after_s: float  # Until the queue has shrunk to what is allowed.


class LoadShedding:
    def __init__(self, view: ClusterView, settings: AdmissionSettings) -> None:
        self._view = view
        self.reload(settings)

    def reload(self, settings: AdmissionSettings) -> None:
        self._settings = settings

    def judge(self, stream: Stream, decision: Decision, now_s: float) -> LoadRefusal | None:
        """Why a stream that has had no attempt is not to start; None: it may."""
        chosen = decision.chosen
        wait_s = chosen.queue_s
        if chosen.source is not None:  # Else one instance does both.
            wait_s += self._view.members[chosen.target].queue_s
        if wait_s <= 0:
            return None
        bound_s = self._settings.wait_s
        if wait_s > bound_s:
            return LoadRefusal(
                act.Reason.OVERLOADED,
                f"the predicted wait is {wait_s:.1f} s; allowed: {bound_s:g} s",
                wait_s - bound_s,
            )
        left_s = stream.due_s() - now_s - chosen.compute_s - chosen.transfer_s
        if 0 < left_s < wait_s:
            return LoadRefusal(
                act.Reason.OVERLOADED,
                f"the predicted wait is {wait_s:.1f} s, too long for {stream.tightest()}",
                wait_s - left_s,
            )
        if wait_s <= bound_s / 2 or not stream.client:
            return None
        work = self._view.work
        prefillers = len(self._view.prefillers or computing_prompts(self._view))
        share_s = bound_s * prefillers / work.clients_with(stream.client)
        if work.of(stream.client) + chosen.compute_s <= share_s:
            return None
        return LoadRefusal(
            act.Reason.OVER_SHARE,
            "the queues are long, and this client has its share of them",
            wait_s - bound_s / 2,
        )
