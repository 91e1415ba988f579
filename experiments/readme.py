"""Kept results in READMEs: a link `[NAME](results/NAME.txt)` to the text of each, and prose under
the same heading that gives no figure which is not in one of these texts.
"""

import re
from pathlib import Path

_LINK = re.compile(r"\]\(results/(\S+\.txt)\)")
_FIGURE = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")
_NO_FIGURES = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")  # Names and links.


def shown_in(readme: str) -> list[str]:
    """The texts that a README links to."""
    return _LINK.findall(readme)


def figures_not_kept(readme: str, folder: Path) -> list[str]:
    """Figures of the prose beside links, up to the next heading, that none of the texts has."""
    missing = []
    for section in re.split(r"^#", readme, flags=re.MULTILINE):
        if texts := shown_in(section):
            kept = {
                each for name in texts for each in _figures((folder / "results" / name).read_text())
            }
            prose = _figures(_NO_FIGURES.sub("", section))
            missing += [figure for figure in prose if figure not in kept]
    return missing


def _figures(text: str) -> list[str]:
    return [figure.replace(",", "").rstrip(".") for figure in _FIGURE.findall(text)]
