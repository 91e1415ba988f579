"""`kvrs docs` prints pages of the documentation, which are installed with the package.

Examples below the help of each command.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer

import kvrs
from kvrs.errors import ConfigError, nearest

# Folder of the documentation's pages: in a checkout, and below the prefix of a Python environment.
_CHECKOUT, _INSTALLED = "docs", "share/doc/kvrs"
_FOLDERS = ("guide", "research")
_SUFFIX = ".md"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # The mark of a figure with its kept result.
_HEADING = re.compile(r"^(##+) (.+)$", re.MULTILINE)

Page = Annotated[
    str | None, typer.Argument(help="PAGE or PAGE#SECTION; without it, a list of all pages")
]


def docs(ctx: typer.Context, page: Page = None) -> None:
    """Print a page of the documentation, one of its sections, or a list of the pages."""
    known = pages()
    if page is None:
        for name, file in sorted(known.items()):
            print(f"{name:<16}{title(file)}")
        return
    if ctx.args:  # Further words are accepted only for this error.
        raise ConfigError(f"got {page!r} and {ctx.args[0]!r}; a section is {page}#{ctx.args[0]}")
    path, _, anchor = page.partition("#")
    name = path.rpartition("/")[2].removesuffix(_SUFFIX)
    if name not in known:
        near = nearest(name, [*known])
        raise ConfigError(f"got {page!r}; allowed: {', '.join(sorted(known))}{near}")
    text = _COMMENT.sub("", known[name].read_text(encoding="utf-8"))
    print(section(text, anchor) if anchor else text, end="")


def pages() -> dict[str, Path]:
    """Return the paths of the documentation's pages by name, in the checkout that kvrs runs from,
    or else in its installation.
    """
    root = Path(kvrs.__file__).parents[1] / _CHECKOUT
    found = [page for folder in _FOLDERS for page in (root / folder).glob(f"*{_SUFFIX}")]
    return {page.stem: page for page in sorted(found or _installed())}


def section(text: str, anchor: str) -> str:
    """Return the section of a page whose heading has this anchor. Raises ConfigError: none has."""
    headings = list(_HEADING.finditer(text))
    anchors = [re.sub(r"[^\w\- ]", "", each[2].lower()).replace(" ", "-") for each in headings]
    if anchor not in anchors:
        raise ConfigError(f"got section {anchor!r}; allowed: {', '.join(anchors)}")
    begin, *others = headings[anchors.index(anchor) :]
    ends = (each.start() for each in others if len(each[1]) <= len(begin[1]))
    return text[begin.start() : next(ends, len(text))]


def title(page: Path) -> str:
    """Return the first heading of a page."""
    with page.open(encoding="utf-8") as lines:
        return next(lines).lstrip("# ").rstrip()


def _installed() -> list[Path]:
    try:
        recorded = files("kvrs") or []
    except PackageNotFoundError:
        return []
    return [
        Path(str(each.locate())).resolve()
        for each in recorded
        if _INSTALLED in str(each) and each.suffix == _SUFFIX
    ]


_EXAMPLES = {
    "proxy": [
        "kvrs proxy --prefill http://a:8100 --decode http://b:8200 --decode http://c:8200",
        "kvrs proxy --config vllm.yaml",
    ],
    "agent": ["KVRS_SECRET=... kvrs agent --config kvrs.yaml --node n0"],
    "accept": ["kvrs accept d0", "kvrs accept d0 --admin-url http://127.0.0.1:8001"],
    "incidents": [
        "kvrs incidents events.jsonl",
        "kvrs incidents events.jsonl d0 --since '2026-11-30 03:57'",
        "kvrs incidents events.jsonl --json | jq '.incidents[].sentence'",
    ],
    "top": [
        "kvrs top --config kvrs.yaml",
        "kvrs top --admin-url http://127.0.0.1:8001 --once",
    ],
    "doctor": ["kvrs doctor --config kvrs.yaml", "kvrs doctor --json"],
    "docs": ["kvrs docs vllm", "kvrs docs | less"],
    "key": ["kvrs key team-a"],
    "profile": [
        "kvrs profile --url http://127.0.0.1:8100 --out table.json",
        "kvrs profile --out table.json --model /models/Llama-3.2-1B",
    ],
    "config check": ["kvrs config check kvrs.yaml"],
    "config show": ["KVRS_PROXY__PORT=8080 kvrs config show kvrs.yaml"],
    "config init": ["kvrs config init vllm.yaml --for vllm"],
    "config schema": ["kvrs config schema > kvrs.schema.json"],
}


def examples(command: str, known: Mapping[str, Sequence[str]] = _EXAMPLES) -> str | None:
    """Return the examples of a command, one paragraph each; None: the command has none."""
    lines = known.get(command)
    return None if lines is None else "\n\n".join(["Examples:", *lines])
