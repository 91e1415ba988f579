"""Number of worlds that a test draws at random."""

import os

from kvrs_testkit.examples import scaled


def seeds(count: int) -> int:
    """`count` in `make test` and ten times as many in `make test-all`, or KVRS_SIM_SEEDS."""
    return int(os.environ.get("KVRS_SIM_SEEDS", scaled(count)))
