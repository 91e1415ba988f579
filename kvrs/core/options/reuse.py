"""Reuse: the target has the front of the history itself; a second source may extend it.

queue(target) [+ wait + hand-shake + more bytes / bandwidth] + prefill(rest given what is there).
"""

from operator import attrgetter

from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.base import Case, RecoveryOption
from kvrs.core.options.migrate import estimate_fetch, extension, fetch_plan, fetch_terms

_REUSE = Option.REUSE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    target = case.target
    pages, second, more_s, wait_s = case.held_pages, None, 0.0, 0.0
    if case.sources and pages < case.wanted_pages:
        second, pages, more_s = extension(case, None, pages, case.slot_wait_s)
        wait_s = case.slot_wait_s if second is not None else 0.0
    estimates.append(
        estimate_fetch(
            _REUSE,
            target,
            case.history_tokens,
            case.history_s,
            pages * target.page_size_tokens,
            transfer_s=more_s,
            queue_s=target.queue_s + wait_s,
            factor=case.factor(_REUSE),
            second=second,
        )
    )


REUSE = RecoveryOption(
    Option.REUSE, estimate, fetch_plan, fetch_terms, needs=attrgetter("held_pages")
)
