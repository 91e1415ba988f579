"""Number of examples of a property: ten times as many in `make test-all` as in `make test`."""

import os

from hypothesis import settings

FACTOR = int(os.environ.get("KVRS_EXAMPLES", "1"))


def examples(count: int, *, stateful_step_count: int = 50) -> settings:
    """Settings without a deadline of a property or a machine, with `count` examples by default."""
    return settings(
        max_examples=count * FACTOR, deadline=None, stateful_step_count=stateful_step_count
    )
