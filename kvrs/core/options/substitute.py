"""Substitute: the attempt goes on at its own instance, which has lost the host of a stage, and has
that of another instance compute it.

It is estimated as in place, from the same report. What is learned of the one says nothing of the
other: to borrow a stage takes a session and the lost cells, to wait for a host the load of its
weights.
"""

from kvrs.core.model.estimates import Option
from kvrs.core.options.base import RecoveryOption
from kvrs.core.options.in_place import estimate, plan, terms

SUBSTITUTE = RecoveryOption(Option.SUBSTITUTE, estimate, plan, terms, fetches=False)
