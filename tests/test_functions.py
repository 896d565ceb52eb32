"""No function is too long, takes too much or is nested too deep, in flows/, infra/, storage/ and tba/.

Claims
- a function has at most 50 lines, docstring and decorators included
- it takes at most six parameters, without `self` (or `cls`, `ctx`); options of a command aside
- blocks (if, for, while, with, try, match) stand at most three deep in each other; `elif` is no deeper than its `if`

Run: pytest tests/test_functions.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MAX_LINES, MAX_PARAMETERS, MAX_DEPTH = 50, 6, 3
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)


def functions(source: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS))


def num_lines(function: ast.FunctionDef) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return function.end_lineno - first + 1


def num_parameters(function: ast.FunctionDef) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len([name for name in named if name.arg not in ("self", "cls", "ctx")])


def depth(node: ast.AST) -> int:
    """Of the blocks below a node; what is defined inside it counts for itself."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def is_command(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("app.command(") for decorator in function.decorator_list)


def faults(source: str) -> list[str]:
    found = []
    for function in functions(source):
        measured = {
            "lines": (num_lines(function), MAX_LINES),
            "parameters": (0 if is_command(function) else num_parameters(function), MAX_PARAMETERS),
            "blocks deep": (depth(function), MAX_DEPTH),
        }
        found += [f"{function.name}: {value} {what}" for what, (value, limit) in measured.items() if value > limit]
    return found


def test_what_is_too_much_is_found():
    deep = "def f():\n for a in b:\n  if a:\n   while a:\n    with a:\n     pass\n   else:\n    pass\n"
    assert faults(deep) == ["f: 4 blocks deep"]
    assert faults("def f():\n if a:\n  pass" + "\n elif a:\n  pass" * 4) == []
    assert faults("def f(self, a, b, c, d, e, *, f): pass") == []
    assert faults("def f(a, b, c, d, e, f, g): pass") == ["f: 7 parameters"]
    assert faults("def f():\n" + " pass\n" * 50) == ["f: 51 lines"]


@pytest.mark.parametrize("folder", ["flows", "infra", "storage", "tba"])
def test_no_function_is_too_much(folder):
    found = {
        str(path.relative_to(PROJECT)): of_file
        for path in sorted((PROJECT / folder).rglob("*.py"))
        if (of_file := faults(path.read_text()))
    }
    assert found == {}
