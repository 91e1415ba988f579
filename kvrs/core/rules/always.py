"""`always_migrate`, `always_restore`, `always_recompute`: the static baselines of seed KVRS."""

from collections.abc import Sequence

from kvrs.config.policy import PolicyName
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.migrate import MIGRATE, RESTORE, REUSE
from kvrs.core.options.recompute import RECOMPUTE
from kvrs.core.options.replay import REPLAY
from kvrs.core.rules.base import Rule


class Always(Rule):
    """Chooses the cheapest estimate of the first preferred option that has an estimate, else the
    cheapest estimate of all options.
    """

    stays = False

    def __init__(self, name: PolicyName, *preferred: Option) -> None:
        super().__init__(name, (REUSE, MIGRATE, RESTORE, RECOMPUTE, REPLAY))
        self._preferred = preferred

    def choose(self, estimates: Sequence[Estimate], fastest: Estimate) -> Estimate:
        for option in self._preferred:
            if found := [estimate for estimate in estimates if estimate.option is option]:
                return min(found, key=lambda estimate: estimate.total_s)
        return fastest


ALWAYS_MIGRATE = Always(PolicyName.ALWAYS_MIGRATE, Option.MIGRATE)
ALWAYS_RESTORE = Always(PolicyName.ALWAYS_RESTORE, Option.RESTORE, Option.RECOMPUTE)
ALWAYS_RECOMPUTE = Always(PolicyName.ALWAYS_RECOMPUTE, Option.RECOMPUTE)
