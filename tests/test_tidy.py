"""The rules of ARCHITECTURE.md on imports, purity, sizes and names."""

import ast
import gc
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A part may import parts of a lower rank; parts of equal rank do not import each other.
RANK = {
    "kvrs": {
        "ids": 0,
        "errors": 0,
        "release_order": 0,
        "sums": 0,
        "tables": 0,
        "process": 0,
        "protocol": 1,
        "profiles": 2,
        "text": 2,
        "config": 3,
        "net": 4,
        "tracing": 5,
        "gossip": 5,
        "transfer": 5,
        "core": 6,
        "engines": 6,
        "agent": 7,
        "proxy": 7,
        "sglang": 7,
        "vllm": 7,
        "api": 8,
        "cli": 8,
        "__main__": 9,
    },
    "kvrs_engine": {"elastic": 0, "scheduling": 1, "engine": 2, "cli": 3},
    "kvrs_lab": {
        "faults": 0,
        "traces": 0,
        "explain": 0,
        "report": 1,
        "load": 2,
        "cluster": 3,
        "sim": 3,
        "api": 4,
        "demo": 4,
        "cli": 5,
    },
}
# Top-level packages that each may import. What tests and experiments share is in the testkit.
_ALL_OF_KVRS = {"kvrs", "kvrs_engine", "kvrs_lab", "distserve_patches"}
ALLOWED_ROOTS = {
    "kvrs": {"kvrs"},
    "kvrs_engine": {"kvrs_engine", "kvrs"},
    "kvrs_lab": {"kvrs_lab", "kvrs_engine", "kvrs"},
    "distserve_patches": {"distserve_patches", "kvrs_engine", "kvrs"},
    "kvrs_testkit": {"kvrs_testkit", *_ALL_OF_KVRS},
    "experiments": {"experiments", "kvrs_testkit", *_ALL_OF_KVRS},
    "tests": {"experiments", "tests", "kvrs_testkit", "tools", *_ALL_OF_KVRS},
    "tools": {"tools", "kvrs"},
}
MOST_TOP_MODULES = 8

PURE = {
    *(f"kvrs.{name}" for name in ("ids", "errors", "release_order", "sums")),
    *(f"kvrs.{name}" for name in ("protocol", "config", "core", "profiles")),
    "kvrs.config.settings",
    *(f"kvrs.transfer.{name}" for name in (*("meter", "limiter", "store.book"),)),
    *(f"kvrs.gossip.{name}" for name in ("authenticator", "facts", "swim", "wire")),
    *(f"kvrs.agent.{name}" for name in ("gpu_health", "record_publisher", "slots")),
    *(f"kvrs.proxy.mirror.{name}" for name in ("book", "records")),
    *(f"kvrs_engine.{name}" for name in ("scheduling", "elastic")),
    "kvrs_lab.faults",
    "kvrs_lab.traces.records",
    *(f"kvrs_lab.report.{name}" for name in ("metrics", "oracle", "impact", "student")),
}
IMPURE_IMPORTS = {
    *("asyncio", "concurrent", "multiprocessing", "select", "signal", "socket", "subprocess"),
    *("threading", "time", "random", "secrets", "uuid", "logging", "aiohttp", "uvloop", "urllib"),
    *("torch", "numpy", "ray", "matplotlib"),
}
# Only the engine computes with tensors, only kvrs in vLLM and SGLang reads their rows, only the
# cluster starts Ray, only the report draws.
HOMES_OF_LIBRARIES = {
    "torch": ["kvrs_engine.engine", "kvrs.engines.proof", "kvrs.sglang", "kvrs.vllm"],
    "sglang": ["kvrs.sglang"],
    "vllm": ["kvrs.vllm"],
    "ray": ["kvrs_lab.cluster"],
    "matplotlib": ["kvrs_lab.report"],
}

# Remote code execution by design; none of them may touch what comes from a socket, a file or shared
# memory.
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "yaml.load", "torch.load"}

LONGEST_FUNCTION = 70


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the tree by its dotted name; collections of garbage pass over the nodes."""
    found = {}
    gc.disable()
    for root in ALLOWED_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text())
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """The process that runs these tests goes on with others: the nodes take 400 MB."""
    yield
    for kept in (imports_of, nodes_of, modules):
        kept.cache_clear()


def product() -> dict[str, ast.Module]:
    return {name: tree for name, tree in modules().items() if root_of(name) in PRODUCT}


PACKAGES = (*RANK,)
PRODUCT = (*PACKAGES, "distserve_patches")


def root_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def nodes_of(module: str) -> list[ast.AST]:
    """All nodes of a module: to walk over a tree takes longer than to look at them."""
    return list(ast.walk(modules()[module]))


@cache
def imports_of(module: str) -> tuple[tuple[int, str], ...]:
    """Line and name of every module that a module imports, at its top or later."""
    return tuple(_imports(module, nodes_of(module)))


def _imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(source), level=0):
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    yield node.lineno, inner if inner in modules() else source
            case ast.ImportFrom():
                raise AssertionError(f"{module}:{node.lineno} imports relatively")
            case _:
                pass


def is_within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_imports_point_down() -> None:
    """Packages by `ALLOWED_ROOTS`, also inside functions; the parts of each by its ranks."""
    wrong = []
    for module in modules():
        for line, name in imports_of(module):
            root, own, other = root_of(module), module.split(".")[1:2], name.split(".")[1:2]
            if root_of(name) not in ALLOWED_ROOTS:
                continue
            if root_of(name) not in ALLOWED_ROOTS[root]:
                wrong.append(f"{module}:{line} imports {name}")
            elif root == root_of(name) and root in RANK and own and other and own != other:
                ranks = RANK[root]
                wrong += [f"{module}:{line} imports {name}"] * (ranks[other[0]] >= ranks[own[0]])

    assert not wrong


def imported_modules() -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions and for types alone."""
    return {
        module: {name for _, name in imports_of(module) if name in modules() and name != module}
        for module in modules()
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Experiments, tests and distserve_patches are looked at too."""
    try:
        TopologicalSorter(imported_modules()).prepare()
        circle: list[str] = []
    except CycleError as error:
        circle = error.args[1]

    assert not circle, " <- ".join(circle)


def test_no_folders_import_each_other() -> None:
    """The folders of a package are layers; a module beside them counts as one."""
    pairs = defaultdict(set)
    for module, names in imported_modules().items():
        for name in names:
            own, other = module.split("."), name.split(".")
            depth = next(
                (at for at, pair in enumerate(zip(own, other, strict=False)) if len(set(pair)) > 1),
                0,
            )
            if depth and root_of(module) == root_of(name):
                parts = ".".join(own[: depth + 1]), ".".join(other[: depth + 1])
                pairs[parts].add(f"{module} -> {name}")

    both = {pair: found for pair, found in pairs.items() if pair[::-1] in pairs}

    assert not both


def test_deciding_code_does_no_io() -> None:
    """Pure code takes `now_s` as an argument, knows no clock, socket, randomness, log or tensor,
    and imports pure code only.
    """
    wrong = [
        f"{module}:{line} imports {name}"
        for module in modules()
        if is_within(module, PURE)
        for line, name in imports_of(module)
        if root_of(name) in IMPURE_IMPORTS
        or (root_of(name) in ALLOWED_ROOTS and not is_within(name, PURE))
    ]

    assert not wrong


def test_heavy_libraries_are_imported_in_one_package_each() -> None:
    """Proxies, agents, the simulator and the command line start without them."""
    wrong = [
        f"{module}:{line} imports {name}"
        for module in modules()
        if root_of(module) in PACKAGES
        for line, name in imports_of(module)
        if root_of(name) in HOMES_OF_LIBRARIES
        and not is_within(module, HOMES_OF_LIBRARIES[root_of(name)])
    ]

    assert not wrong


def test_nothing_that_comes_from_outside_can_run_code() -> None:
    """No pickle, no eval, no yaml.load and no torch.load anywhere."""
    wrong = []
    for module in product():
        wrong += [
            f"{module}: {name}" for _, name in imports_of(module) if name in FORBIDDEN_IMPORTS
        ]
        calls = [ast.unparse(node.func) for node in nodes_of(module) if isinstance(node, ast.Call)]
        wrong += [f"{module}: {call}" for call in calls if call in FORBIDDEN_CALLS]

    assert not wrong


def test_functions_stay_readable() -> None:
    """A function has at most 70 lines. Files and classes have no cap: what shares its state stays
    in one place, and what a reader walks through counts (`experiments.request_path.gauge`).
    """
    wrong = [
        f"{module}.{node.name}: {length} lines"
        for module in product()
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]

    assert not wrong


# Names of two classes. The list may only get shorter.
TWICE = {
    "Backend",  # The setting, and the interface of the proxy to an engine.
    "Member",  # Of the gossip, and of the policy's view of the cluster.
    "Peer",  # An engine as the proxy calls it, and a page port to fetch from.
    "Stage",  # Of a stream, and of DistServe's pipeline.
    "Stream",  # Of a client, and the stand-in for torch.cuda.Stream.
}


def test_the_proxy_is_no_flat_folder() -> None:
    """Its modules are found by package; only what starts it stands at its top."""
    top = [path.name for path in (ROOT / "kvrs" / "proxy").glob("*.py")]

    assert len(top) <= 3, f"kvrs/proxy holds {sorted(top)}"


def test_few_modules_stand_beside_the_folders() -> None:
    """A module at the top of kvrs is a foundation of all folders, or what starts kvrs."""
    top = [path.name for path in (ROOT / "kvrs").glob("*.py")]

    assert len(top) <= MOST_TOP_MODULES, f"kvrs holds {sorted(top)}"


def test_a_public_class_name_means_one_thing() -> None:
    """A name that is searched for leads to one class."""
    places = defaultdict(list)
    for module, tree in product().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {name for name, found in places.items() if len(found) > 1}

    assert twice == TWICE


# A recovery option and how many files of the product may name it: it is a file of its own, which
# the others go through by the registry (docs/decisions/0033).
NAMES_OF_OPTION, MAX_FILES_OF_OPTION = re.compile(r"\b(in_place|IN_PLACE|InPlace)\b"), 8


def test_a_recovery_option_is_named_in_few_files() -> None:
    """The number of files that know of it is what it costs to follow, and to change."""
    files = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if NAMES_OF_OPTION.search(path.read_text())
    ]

    assert len(files) <= MAX_FILES_OF_OPTION, files


# Folders whose docstrings are checked, and words that answer a noun which the reader has to guess.
WORDED = (*PRODUCT, "kvrs_testkit", "tests", "experiments", "tools")
FRAGMENT = re.compile(r"\W*(Of|Beside|As|Whether|What)\b")

# A module's docstring that begins with a participle, a pronoun or a preposition has no subject.
NO_SUBJECT = re.compile(
    r"\W*((?!Ring|String|Thing)\w+ing|One (of|that|which)|It|Its|They|This|That|These|Those"
    r"|Everything|Something|Who|Which|What|Where|When|How|Why|In|On|At|By|For|From|With|Without"
    r"|To|Into|Under|Over|Between|Behind|Within|During|After|Before|Taken|Given|Made|Kept"
    r"|\w+ed (as|by|for|from|in|of|to|with))\b"
)


def docstrings(module: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of those below attributes: a setting's description."""
    for node in nodes_of(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case _:
                pass


def test_docstrings_name_what_they_describe() -> None:
    """A docstring is a noun phrase that names the thing, or has a subject and a verb."""
    wrong = [
        f"{module}:{line} {text[:50]!r}"
        for module in modules()
        if root_of(module) in WORDED
        for line, text in docstrings(module)
        if FRAGMENT.match(text)
    ]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "Sending of pages, behind all other traffic.",
        "One of the two instances of a server.",
        "Which ports are free.",
        "From output ids to text.",
        "Taken is what clients send.",
        "Learned from loads.",
    ],
)
def test_docstrings_without_a_subject_are_found(text: str) -> None:
    assert NO_SUBJECT.match(text)


def test_docstrings_of_modules_begin_with_their_subject() -> None:
    """A first sentence has its subject first: no participle, pronoun or preposition."""
    wrong = [
        f"{module} {text[:50]!r}"
        for module, tree in modules().items()
        if root_of(module) in (*PRODUCT, "kvrs_testkit")
        if (text := ast.get_docstring(tree)) and NO_SUBJECT.match(text)
    ]

    assert not wrong, "\n".join(wrong)


# A word at the start of a docstring or a comment that stands for a thing which it does not name.
UNNAMED = re.compile(
    r"\W*(Of|As|Beside|Behind|That|Those|Such|So|It|Its|They|How|Who|Whose|Which|Where|When|Why|What"
    r"|Whether)\b"
)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first words of each comment; a comment above code may go on for several lines."""
    last = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                line, column = token.start
                if last < line - 1 or token.line[:column].strip():
                    yield line, token.string
                last = line


def test_docstrings_and_comments_name_their_thing() -> None:
    """A reader who sees no other line of the file knows what each of them is about."""
    wrong = [
        f"{module}: {text[:50]!r}"
        for module in modules()
        if root_of(module) in PRODUCT
        for node in nodes_of(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if UNNAMED.match(text := ast.get_docstring(node) or "")
    ]
    wrong += [
        f"{path.relative_to(ROOT)}:{line} {text[:50]!r}"
        for package in PRODUCT
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in comments(path)
        if UNNAMED.match(text)
    ]

    assert not wrong, "\n".join(wrong)


def test_test_modules_have_names_of_their_own() -> None:
    """Folders of tests are no packages, so pytest imports a module by its name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))

    assert not [name for name, count in names.items() if count > 1]
