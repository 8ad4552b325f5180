"""Mutants of a module: each is its syntax tree with one small change that a test should notice. Pure."""

import ast
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

COMPARED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
COUNTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
REMOVED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What decides nothing: annotations, decorators, the options of a class, and the words of an error.
NO_DECISION = {"annotation", "returns", "decorator_list", "bases", "keywords", "exc", "cause"}


class Mutant(NamedTuple):
    """One change, said so that it is found again when lines move.

    function: the outermost one it lies in, with its class; "" where it runs when the module is imported, so that the
    module must be imported anew to have it. was, becomes: its statement, without the statements inside it.
    """

    function: str
    line: int
    was: str
    becomes: str


class _Edit(NamedTuple):
    node: Any
    field: str
    value: Any


class _Place(NamedTuple):
    node: Any
    statement: Any
    function: str
    removal: _Edit | None


def mutants(source: str) -> Iterator[tuple[Mutant, ast.Module]]:
    """Every mutant of a module with its tree, good until the next one is asked for; what is new in it has no line yet."""
    tree = ast.parse(source)
    for place in list(_places(tree, None, "", "")):
        was = _headline(place.statement)
        for edit in (*([place.removal] if place.removal else []), *_edits(place.node)):
            before = getattr(edit.node, edit.field)
            setattr(edit.node, edit.field, edit.value)
            becomes = "pass" if edit is place.removal else _headline(place.statement)
            if was != becomes:
                line = getattr(place.node, "lineno", place.statement.lineno)
                yield Mutant(place.function, line, was, becomes), tree
            setattr(edit.node, edit.field, before)


def _headline(statement: ast.stmt) -> str:
    if not hasattr(statement, "body"):
        return ast.unparse(statement)
    bare = copy(statement)
    for field in ("body", "orelse", "finalbody", "handlers"):
        if hasattr(bare, field):
            setattr(bare, field, [ast.Pass()] if field == "body" else [])
    return next(line for line in ast.unparse(bare).split("\n") if not line.startswith("@"))


def _places(node: ast.AST, statement: ast.AST | None, prefix: str, function: str) -> Iterator[_Place]:
    """Nodes that may be changed. prefix: the classes around; function: the outermost function whose body this is."""
    for field, value in ast.iter_fields(node):
        if field in NO_DECISION and not (field == "keywords" and isinstance(node, ast.Call)):
            continue
        inside = function
        if isinstance(node, FUNCTIONS) and field == "body" and not function:
            inside = f"{prefix}{node.name}"
        below = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_fixed(child, inside):
                continue
            own = child if isinstance(child, ast.stmt) else statement
            if hasattr(child, "lineno") or isinstance(child, ast.comprehension):
                yield _Place(child, own, inside, _removal(node, field, value, at, child))
            yield from _places(child, own, below, inside)


def _is_fixed(node: ast.AST, function: str) -> bool:
    """Imports, docstrings, parts of f-strings, and at the top of a module the names of types."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if function or not isinstance(node, ast.Assign):
        return False
    is_union = isinstance(node.value, ast.BinOp) and not any(isinstance(one, ast.Constant) for one in ast.walk(node))
    return is_union or isinstance(node.value, ast.Subscript)


def _removal(parent: ast.AST, field: str, siblings: Any, at: int, child: ast.AST) -> _Edit | None:
    """Leaves a statement out, where what follows still has its names."""
    stored = isinstance(child, ast.Assign) and not any(isinstance(one, ast.Name | ast.Tuple) for one in child.targets)
    called = isinstance(child, ast.Expr) and not isinstance(child.value, ast.Yield)
    if isinstance(siblings, list) and (stored or called or isinstance(child, REMOVED)):
        return _Edit(parent, field, [*siblings[:at], ast.Pass(), *siblings[at + 1 :]])
    return None


def _edits(node: Any) -> Iterator[_Edit]:
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                for other in COMPARED.get(type(op), ()):
                    yield _Edit(node, "ops", [*node.ops[:at], other(), *node.ops[at + 1 :]])
        case ast.BinOp() | ast.AugAssign() if type(node.op) in COUNTED:
            yield _Edit(node, "op", COUNTED[type(node.op)]())
        case ast.BoolOp():
            yield _Edit(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            if isinstance(node.op, ast.Not):
                yield _Edit(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
            else:
                yield _Edit(node, "op", ast.UAdd())
        case ast.If() | ast.IfExp() | ast.While():
            yield _Edit(node, "test", ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension():
            for at in range(len(node.ifs)):
                yield _Edit(node, "ifs", [*node.ifs[:at], *node.ifs[at + 1 :]])
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield _Edit(node, "value", ast.Constant(None))
        case ast.Constant():
            yield from (_Edit(node, "value", other) for other in _others(node.value))
        case ast.Call():
            yield from _calls(node)


def _others(value: object) -> list[object]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value + 1, value - 1]
        case str():
            return [f"{value}~"]
        case bytes():
            return [value + b"~"]
    return []


def _calls(node: ast.Call) -> Iterator[_Edit]:
    """Two arguments in each other's place, an option left out, the opposite function."""
    is_either_way = isinstance(node.func, ast.Name) and node.func.id in SWAPPED
    if len(node.args) >= 2 and not is_either_way and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
        yield _Edit(node, "args", [node.args[1], node.args[0], *node.args[2:]])
    for at, option in enumerate(node.keywords):
        if option.arg is not None:
            yield _Edit(node, "keywords", [*node.keywords[:at], *node.keywords[at + 1 :]])
    if isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
        yield _Edit(node, "func", ast.Name(SWAPPED[node.func.id], ast.Load()))
