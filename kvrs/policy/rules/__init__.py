"""The policies by name (`policy.name`), one file each. A new one is listed here and named in
`PolicyName`: its members are the values that the configuration allows.
"""

from collections.abc import Mapping

from kvrs.config.policy import PolicyName
from kvrs.policy.rules.always import ALWAYS_MIGRATE, ALWAYS_RECOMPUTE, ALWAYS_RESTORE
from kvrs.policy.rules.auto import AUTO
from kvrs.policy.rules.base import Rule
from kvrs.policy.rules.rom import ROM

ALL = (ALWAYS_MIGRATE, ALWAYS_RECOMPUTE, ALWAYS_RESTORE, ROM, AUTO)
BY_NAME: Mapping[PolicyName, Rule] = {rule.name: rule for rule in ALL}
