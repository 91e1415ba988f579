"""Substitute: the attempt goes on at its own instance, which has lost the host of a pipeline stage
and borrows the same stage of another instance.

The estimate is that of in place, from the same report. Its learned factor is a separate one:
borrowing a stage costs a session and the lost cells, a new host costs loading the weights.
"""

from kvrs.core.model.estimates import Option
from kvrs.core.options.base import RecoveryOption
from kvrs.core.options.in_place import estimate, plan, terms

SUBSTITUTE = RecoveryOption(Option.SUBSTITUTE, estimate, plan, terms, fetches=False)
