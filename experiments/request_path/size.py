"""Lines of the tree: now, before its fold and right after, by part, by feature that came since, and
by kind; and what a user meets: settings of the file, options of the commands, metric families.

Of a feature only files of its own count, which the fold had not; some took over lines of others.
Equal functions are those of five lines or more with the same statements. Settings are the keys that
have a value, each once, also where a list has several sections with this key. An option counts for
each command that has it; `--help` and those of completion do not. Metric families are those that
/metrics of a proxy in front of vLLM names, the library's own about the process included.
"""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import typer
from prometheus_client import generate_latest
from typer.main import get_command

from experiments.command_line import parser_of
from experiments.record import ROOT, Record
from kvrs.cli import app
from kvrs.config.cluster import Backend
from kvrs.config.file import Config, parse_config
from kvrs.config.first_file import first_file
from kvrs.config.settings import Settings, parse_yaml
from kvrs.proxy.streams.metrics import Metrics

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


def settings(model: type[Settings] = Config, above: str = "") -> Iterator[str]:
    """The paths of all keys with a value; `models` has those of the file again."""
    for key, field in model.model_fields.items():
        path = f"{above}{key}"
        below = [*_sections(field.annotation)]
        if path == "models":
            continue
        if not below:
            yield path
        for section in below:
            yield from settings(section, f"{path}.")


def _sections(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    else:  # A list of sections, or a section or null.
        for each in getattr(annotation, "__args__", ()):
            yield from _sections(each)


def options_of_commands() -> Iterator[str]:
    """Each option with the command before it."""
    return _options(typer.Context(root := get_command(app), info_name="kvrs"), root)


def _options(context: Any, command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and "completion" not in parameter.name:
            yield f"{context.command_path} {parameter.opts[0]}"
    names = command.list_commands(context) if hasattr(command, "commands") else ()
    for name in names:
        below = command.get_command(context, name)
        yield from _options(typer.Context(below, parent=context, info_name=name), below)


def families_before_vllm() -> list[str]:
    """The metric families of a proxy with the first file for vLLM, without a report of any."""
    config = parse_config(parse_yaml(first_file(Backend.VLLM)))
    instances = {instance.id: instance.role for _, instance in config.cluster.instances()}
    agents = [node.agent_id for node in config.cluster.nodes]
    text = generate_latest(Metrics(instances, agents).registry).decode()
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


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
        "settings": len([*settings()]),
        "options": len([*options_of_commands()]),
        "families_before_vllm": len(families_before_vllm()),
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
    lines += [
        "",
        f"{'settings':<40}{figures['settings']:>9,}",
        f"{'options of the CLI':<40}{figures['options']:>9,}",
        f"{'metric families before vLLM':<40}{figures['families_before_vllm']:>9,}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
