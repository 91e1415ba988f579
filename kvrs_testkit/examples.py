"""Number of examples of a property: half of what each states in `make test`, ten times as many in
`make test-all`.
"""

import os

from hypothesis import settings

_FACTOR = float(os.environ.get("KVRS_EXAMPLES", "0.5"))


def scaled(count: int) -> int:
    return max(1, round(count * _FACTOR))


def examples(count: int, *, stateful_step_count: int = 50) -> settings:
    """Settings without a deadline of a property or a machine, with `count` examples by default."""
    return settings(
        max_examples=scaled(count), deadline=None, stateful_step_count=stateful_step_count
    )
