"""Write a tiny model, or a pair of a target and a draft model.

    python -m kvrs_engine.engine.tiny DIR [SEED]
    python -m kvrs_engine.engine.tiny --pair DIR [--acceptance 0.6]

The second command writes `DIR/target` and `DIR/draft`; the greedy tokens of both are equal with the
given probability.
"""

import argparse
from pathlib import Path

from kvrs.errors import ConfigError
from kvrs.process.memory import collect_nothing_yet
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.speculation.pairs import write_pair


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("seed", type=int, nargs="?", default=0, metavar="SEED")
    parser.add_argument("--pair", action="store_true", help="write a target and a draft")
    parser.add_argument("--acceptance", type=float, default=0.6, help="of drafts (default 0.6)")
    options = parser.parse_args()
    try:
        if options.pair:
            found = write_pair(options.directory, options.acceptance, options.seed)
            print(f"{options.directory}: the draft proposes what the target chooses in {found:.1%}")
        else:
            write_tiny_model(options.directory, options.seed)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    collect_nothing_yet()
    main()
