"""The options that command lines of experiments have in common."""

import argparse
from pathlib import Path


def parser_of(
    doc: str | None, file: str | None = None, *, seed: int | None = None
) -> argparse.ArgumentParser:
    """A parser with `--out`, and with `--seed` where that has a default.

    Args:
        doc: the docstring of the experiment, which `--help` prints.
        file: the experiment's, whose results lie in `results` beside it. None: a run that is not
            told where keeps nothing.
        seed: default of `--seed`.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kept = Path(file).parent / "results" if file else None
    parser.add_argument("--out", type=Path, default=kept, help="directory of the kept result")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed)
    return parser
