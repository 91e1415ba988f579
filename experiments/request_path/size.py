"""Lines of the tree: now, before its fold and right after, by part, by feature that came since, and
by kind.

Of a feature only files of its own count, which the fold had not; some took over lines of others.
Equal functions are those of five lines or more with the same statements.
"""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from experiments.command_line import parser_of
from experiments.record import ROOT, Record

BEFORE, FOLDED = "e2ed9aa", "1b74594a"
PACKAGES = ("kvrs", "kvrs_engine", "kvrs_lab")  # One, kvrs, at both commits.
PARTS = {
    "product": PACKAGES,
    "tests": ("tests", "kvrs_testkit"),
    "experiments": ("experiments",),
}
FEATURES = {
    "stages in hosts, loans, replicas": """
        engine/ranks/[!r]*.py engine/ranks/re[pt]*.py engine/ring.py engine/stage_loans.py
        engine/replicas.py engine/rank_reports.py elastic/lending.py protocol/stages.py
        scheduling/replicas.py scheduling/page_*.py core/options/substitute.py sim/hosts.py
        sim/pipelines.py sim/lent_stages.py sim/returning.py sim/lost_cells.py sim/pulling.py""",
    "the connector in vLLM": """
        vllm/*.py proxy/backends/vllm_*.py core/options/replay.py proxy/streams/replayed.py""",
    "drafts": """
        engine/speculation/*.py */speculation.py */drafts.py scheduling/draft_batches.py
        scheduling/alignment.py scheduling/assisted.py elastic/pairing.py elastic/assistance.py""",
    "mixtures of experts": """
        */experts.py engine/layers/experts.py engine/random_experts.py engine/ranks/routed*.py""",
    "several models at one port": "cluster/models.py config/models.py proxy/models/*.py",
    "instances and proxies by Kubernetes": """
        */fleet/pods.py */fleet/numbered_peers.py */fleet/peer_names.py config/other_proxies.py""",
    "the simulator as a tool": "sim/*.py",
}


def lines_at(commit: str) -> Counter[str]:
    """The lines of each Python file of a commit."""
    found = _git("grep", "--count", "", commit, "--", "*.py").splitlines()
    return Counter({path: int(lines) for _, path, lines in (line.split(":") for line in found)})


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def below(lines: Counter[str], folders: Iterable[str]) -> int:
    return sum(count for path, count in lines.items() if path.partition("/")[0] in folders)


# Files that came from another folder.
_RENAMED = {
    "kvrs/cli/incidents.py": "kvrs/explain/incidents.py",
    "kvrs/core/explanation.py": "kvrs/explain/decision.py",
    "kvrs/net/admin.py": "kvrs/load/admin.py",
    "kvrs/protocol/fault_orders.py": "kvrs/faults/orders.py",
}


def old_place(path: str) -> str:
    """The path that a file had, or would have had, in the one package."""
    if path in _RENAMED:
        return _RENAMED[path]
    package, _, inner = path.partition("/")
    if package in PACKAGES[1:]:
        return f"kvrs/{inner}"
    if inner.startswith(("net/", "process/")):
        return f"kvrs/{PurePath(inner).name}"
    return path


def features(now: Counter[str], folded: Counter[str]) -> dict[str, int]:
    """Lines of new files by feature; a file is of the first one that names it."""
    found = Counter(dict.fromkeys(FEATURES, 0))
    for path, count in now.items():
        if path.startswith("kvrs/") and path not in folded:
            names = (
                name
                for name, patterns in FEATURES.items()
                if any(PurePath(path).match(f"kvrs/{each}") for each in patterns.split())
            )
            found[next(names, "other new files")] += count
    old = sum(now[path] - folded[path] for path in folded if path.startswith("kvrs/"))
    return dict(found) | {"files that were there": old}


def kinds(trees: dict[str, ast.Module], texts: dict[str, list[str]]) -> dict[str, int]:
    """Lines of the product that are no code."""
    found: Counter[str] = Counter()
    for path, tree in trees.items():
        found["blank"] += sum(not line.strip() for line in texts[path])
        found["comments"] += sum(line.strip().startswith("#") for line in texts[path])
        for node in ast.walk(tree):
            match node:
                case ast.Import() | ast.ImportFrom():
                    found["imports"] += _length(node)
                case ast.Expr(value=ast.Constant(value=str())):
                    found["docstrings"] += _length(node)
                case _:
                    pass
    return dict(found)


def repeated(trees: dict[str, ast.Module]) -> int:
    """Lines that equal functions would spare if each were there once."""
    lengths = defaultdict(list)
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) >= 5:
                lengths["".join(_code(node))].append(_length(node))
    return sum(sum(sorted(each)[:-1]) for each in lengths.values())


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for statement in node.body[ast.get_docstring(node) is not None :]:
        yield ast.dump(statement)


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record(timed=False)
    before, folded, now = (lines_at(commit) for commit in (BEFORE, FOLDED, "HEAD"))
    parts = {
        name: {
            "before": below(before, folders),
            "folded": below(folded, folders),
            "now": below(now, folders),
        }
        for name, folders in PARTS.items()
    }
    texts = {path: (ROOT / path).read_text() for path in now}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    product = {path: tree for path, tree in trees.items() if path.partition("/")[0] in PACKAGES}
    figures: dict[str, Any] = {
        "parts": parts,
        "features": features(Counter({old_place(path): now[path] for path in now}), folded),
        "kinds": kinds(product, {path: texts[path].splitlines() for path in product}),
        "repeated": repeated(trees),
        "top_modules": sum(PurePath(path).parent == PurePath("kvrs") for path in product),
    }
    text = as_text(figures)
    print(text)
    record.keep(options.out, "size", figures, text)


def as_text(figures: dict[str, Any]) -> str:
    lines = [f"{'lines':<40}{'before':>9}{'folded':>9}{'now':>9}"]
    for name, part in figures["parts"].items():
        lines.append(f"{name:<40}" + "".join(f"{each:>9,}" for each in part.values()))
    lines += ["", "product since the fold"]
    lines += [f"{name:<40}{count:>9,}" for name, count in figures["features"].items()]
    lines += ["", "lines of the product that are no code"]
    lines += [f"{name:<40}{count:>9,}" for name, count in figures["kinds"].items()]
    lines += ["", f"{'equal functions, all parts':<40}{figures['repeated']:>9,}"]
    lines += [f"{'modules at the top of kvrs/':<40}{figures['top_modules']:>9,}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
