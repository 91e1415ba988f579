"""Kept results in READMEs.

    <!-- results: poison.txt -->
    <!-- end of results -->

Between the two lines stands `results/poison.txt`, put there by `python -m experiments.run_all
--readme`. Prose under the heading of a block gives no figure that is not in one of its blocks.
"""

import re
from pathlib import Path

_BLOCK = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end of results -->\n", re.DOTALL)
_FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")
_NO_FIGURES = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")  # Names and links.


def renewed(readme: str, folder: Path) -> str:
    """The text with every block as `folder` has it now."""

    def block(match: re.Match[str]) -> str:
        kept = (folder / "results" / match[1]).read_text()
        return f"<!-- results: {match[1]} -->\n```\n{kept}```\n<!-- end of results -->\n"

    return _BLOCK.sub(block, readme)


def shown_in(readme: str) -> list[str]:
    return _BLOCK.findall(readme)


def without_blocks(readme: str) -> str:
    return _BLOCK.sub("", readme)


def figures_not_kept(readme: str) -> list[str]:
    """Figures of the prose beside blocks, up to the next heading, that none of the blocks has."""
    missing = []
    for section in re.split(r"^#", readme, flags=re.MULTILINE):
        blocks = "\n".join(match[0] for match in _BLOCK.finditer(section))
        if blocks:
            kept = set(_figures(blocks))
            prose = _NO_FIGURES.sub("", without_blocks(section))
            missing += [figure for figure in _figures(prose) if figure not in kept]
    return missing


def _figures(text: str) -> list[str]:
    return [figure.replace(",", "").rstrip(".") for figure in _FIGURE.findall(text)]
