"""The policies by name (`policy.name`), one file each. A new policy is listed here and named in
`PolicyName`, the values that the configuration allows.
"""

from collections.abc import Mapping

from kvrs.config.policy import PolicyName
from kvrs.core.rules.always import ALWAYS_MIGRATE, ALWAYS_RECOMPUTE, ALWAYS_RESTORE
from kvrs.core.rules.auto import AUTO
from kvrs.core.rules.base import Rule
from kvrs.core.rules.rom import ROM

ALL = (ALWAYS_MIGRATE, ALWAYS_RECOMPUTE, ALWAYS_RESTORE, ROM, AUTO)
BY_NAME: Mapping[PolicyName, Rule] = {rule.name: rule for rule in ALL}
