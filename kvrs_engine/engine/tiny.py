"""Write a tiny model, or a pair of which one proposes what the other one chooses.

    python -m kvrs_engine.engine.tiny DIR [SEED]
    python -m kvrs_engine.engine.tiny --pair DIR [--acceptance 0.6]
    python -m kvrs_engine.engine.tiny --experts 8 --chosen 2 --skew 1 DIR [SEED]

The second writes `DIR/target`, and `DIR/draft`, whose greedy token is the target's with that
probability. The third writes a mixture of experts of which the first are chosen most often, the
more the greater the skew is.
"""

import argparse
from pathlib import Path

from kvrs.errors import ConfigError
from kvrs.process.garbage import collect_nothing_yet
from kvrs_engine.engine.random_experts import FAMILIES, ExpertsModel, write_experts_model
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.speculation.pairs import write_pair


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("seed", type=int, nargs="?", default=0, metavar="SEED")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--pair", action="store_true", help="write a target and a draft")
    kinds.add_argument("--experts", type=int, metavar="N", help="write a mixture of so many")
    parser.add_argument("--acceptance", type=float, default=0.6, help="of drafts (default 0.6)")
    experts = parser.add_argument_group("with --experts")
    experts.add_argument("--chosen", type=int, metavar="N", help="by each token (default 2)")
    experts.add_argument("--skew", type=float, help="of the router (default 0)")
    experts.add_argument("--family", choices=FAMILIES, help=f"(default {FAMILIES[0]})")
    experts.add_argument("--large", action="store_true", help="with 1 GB of weights (mixtral)")
    options = parser.parse_args()
    if options.experts is None:
        for name in ("chosen", "skew", "family", "large"):
            if getattr(options, name):
                parser.error(f"--{name}: allowed with --experts only")
    try:
        if options.experts is not None:
            _write_experts(options)
        elif options.pair:
            found = write_pair(options.directory, options.acceptance, options.seed)
            print(f"{options.directory}: the draft proposes what the target chooses in {found:.1%}")
        else:
            write_tiny_model(options.directory, options.seed)
    except ConfigError as error:
        parser.error(str(error))


def _write_experts(options: argparse.Namespace) -> None:
    """Raises ConfigError: an option is wrong, or the directory has another model."""
    make = ExpertsModel.large if options.large else ExpertsModel.tiny
    model = make(
        options.family or FAMILIES[0],
        experts=options.experts,
        chosen=2 if options.chosen is None else options.chosen,
        skew=options.skew or 0.0,
    )
    write_experts_model(options.directory, model, options.seed)


if __name__ == "__main__":
    collect_nothing_yet()
    main()
