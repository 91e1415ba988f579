"""Forty docstrings and comments of `kvrs`, drawn by a seed, for a reader who has not written them.

A place is a docstring with the name and the parameters of what it describes, or the lines of a
comment with the line of code that it stands beside. The reader sees nothing else of the file and
says which places remain unclear; a second call with their numbers keeps the result.
"""

import ast
import io
import random
import tokenize
from collections.abc import Iterator
from pathlib import Path

import msgspec

from experiments.command_line import parser_of
from experiments.record import ROOT, Record

PLACES = 40
AT_MOST = 2


class Place(msgspec.Struct):
    path: str
    line: int
    of: str
    """The definition, or the line of code beside a comment."""
    text: str


def places_of(path: str, text: str) -> Iterator[Place]:
    tree, source = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (said := ast.get_docstring(node)) is None:
            continue
        if isinstance(node, ast.Module):
            yield Place(path, 1, "the module", said)
        else:
            header = source[node.lineno - 1 : node.body[0].lineno - 1]
            yield Place(path, node.lineno, " ".join(each.strip() for each in header), said)
    begun, words = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            begun = begun if words else token.start[0]
            words.append(token.string.lstrip("# "))
            if beside := token.line[: token.start[1]].strip():
                yield Place(path, begun, beside, " ".join(words))
                words.clear()
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and words:
            yield Place(path, begun, token.line.strip(), " ".join(words))
            words.clear()


def draw(seed: int) -> list[Place]:
    files = sorted((ROOT / "kvrs").rglob("*.py"))
    every = [each for file in files for each in places_of(_name(file), file.read_text())]
    return random.Random(seed).sample(every, PLACES)


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def main() -> None:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument(
        "--unclear", help="numbers of the places that a reader found unclear: 3,17 or none"
    )
    options = parser.parse_args()
    drawn = draw(options.seed)
    if options.unclear is None:
        for number, place in enumerate(drawn, 1):
            print(f"{number}. {place.path}:{place.line}\n   {place.of}\n")
            print("\n".join(f"      {line}" for line in place.text.splitlines()) + "\n")
        return
    record = Record(options.seed, timed=False)
    numbers = [int(each) for each in options.unclear.split(",") if each != "none"]
    unclear = [drawn[number - 1] for number in numbers]
    text = "\n".join(
        [f"unclear: {len(unclear)} of {PLACES}, at most {AT_MOST}"]
        + [f"{each.path}:{each.line}  {' '.join(each.text.split())[:70]}" for each in unclear]
    )
    print(text)
    record.keep(options.out, "places", {"unclear": msgspec.to_builtins(unclear)}, text)


if __name__ == "__main__":
    main()
