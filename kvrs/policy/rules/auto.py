"""`auto`: the cheapest of all options, at the assigned target and at the least loaded ones beside
it (DESIGN section 5).
"""

from kvrs.config.policy import PolicyName
from kvrs.policy import options
from kvrs.policy.rules.base import Rule


class Auto(Rule):
    several_targets = True


AUTO = Auto(PolicyName.AUTO, options.ALL)
