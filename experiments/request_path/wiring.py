"""How much of `kvrs` is wired rather than read: parameters that are callables, attributes of other
objects that are set to a method or a function, records of many fields, and modules whose top-level
names do not use each other.

A parameter counts where its annotation names `Callable`, itself or by an alias of the tree. A
callback set from outside is an assignment to an attribute of something else than `self`, whose
value is a lambda, a function of the module or a method of the class around it. The fields of a
record are those that its class and its bases in the tree annotate. Two names of a module are in one
part if one of them uses the other, or both use a third function or class of it.
"""

import ast
from collections.abc import Collection, Iterator, Mapping

Trees = Mapping[str, ast.Module]  # By path.
MOST_FIELDS = 40


def callable_parameters(trees: Trees) -> list[str]:
    """The parameters that are callables, by path and line."""
    aliases = {
        target.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and _names_callable(node.value, {"Callable"})
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    known = aliases | {"Callable"}
    return [
        f"{path}:{node.lineno} {node.arg}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.annotation and _names_callable(node.annotation, known)
    ]


def _names_callable(node: ast.expr, known: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in known for each in ast.walk(node))


def callbacks_from_outside(trees: Trees) -> list[str]:
    """The assignments of a callback to an attribute of another object, by path and line."""
    return [
        f"{path}:{line} {text}"
        for path, tree in trees.items()
        for line, text in _outer_callbacks(tree)
    ]


def _outer_callbacks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    methods = {
        id(inner): _methods(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for inner in ast.walk(node)
    }
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    for node in found:
        if _is_callback(node.value, methods.get(id(node), set()), functions):
            yield from (
                (node.lineno, ast.unparse(target))
                for target in node.targets
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self"
            )


def _methods(node: ast.ClassDef) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    properties = {"property", "cached_property"}
    return {
        each.name
        for each in node.body
        if isinstance(each, kinds)
        and not properties & {ast.unparse(mark).rpartition(".")[2] for mark in each.decorator_list}
    }


def _is_callback(value: ast.expr, methods: set[str], functions: set[str]) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name in methods
        case _:
            return False


def wide_records(trees: Trees) -> dict[str, int]:
    """The classes with more than `MOST_FIELDS` fields, those of their bases included."""
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def fields(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        own = {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and "ClassVar" not in ast.unparse(each.annotation)
        }
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
        return own.union(*map(fields, bases))

    found = {name: len(fields(name)) for name in classes}
    return {name: count for name, count in sorted(found.items()) if count > MOST_FIELDS}


def parts(tree: ast.Module) -> list[set[str]]:
    """The top-level functions and classes of a module, in sets that use each other; a constant that
    is made by one of them stands for it.
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined: dict[str, ast.AST] = {node.name: node for node in tree.body if isinstance(node, kinds)}
    made = dict(_made_constants(tree, defined.keys()))
    uses = {
        name: {
            used
            for each in ast.walk(node)
            if isinstance(each, ast.Name)
            for used in ({each.id} & defined.keys()) | made.get(each.id, set())
        }
        for name, node in defined.items()
    }
    found: list[set[str]] = []
    for name, used in uses.items():
        joined = {name} | used
        apart = [part for part in found if not part & joined]
        found = [*apart, joined.union(*(part for part in found if part & joined))]
    return found


def _made_constants(tree: ast.Module, defined: Collection[str]) -> Iterator[tuple[str, set[str]]]:
    """The functions and classes of the module that make each of its constants."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            makers = {
                each.id
                for each in ast.walk(node.value)
                if isinstance(each, ast.Name) and each.id in defined
            }
            for each in (name for target in node.targets for name in ast.walk(target)):
                if isinstance(each, ast.Name) and makers:
                    yield each.id, makers
