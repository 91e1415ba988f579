"""A proxy whose `auto` takes one option for each victim that has an estimate of it.

python -m experiments.decisions.forced OPTION --config FILE
"""

import sys
from typing import Any

from experiments.decisions.states import Forced, Future
from kvrs.cli import main as kvrs
from kvrs.config.policy import PolicyName
from kvrs.core.model.estimates import Option
from kvrs.core.rules import BY_NAME


def main() -> None:
    option, *arguments = sys.argv[1:]
    rules: Any = BY_NAME  # Of this process.
    rules[PolicyName.AUTO] = Forced(Future(option, forced=Option(option)))
    sys.argv = ["kvrs", "proxy", *arguments]
    kvrs()


if __name__ == "__main__":
    main()
