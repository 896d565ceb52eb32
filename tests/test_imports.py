"""Claim: flows/ imports tba and storage, which import neither flows nor each other; tests may import all.

Read from the source, so imports inside functions count too. Run: pytest tests/test_imports.py
"""

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
FORBIDDEN = {"tba": {"flows", "storage", "tests"}, "storage": {"flows", "tba", "tests"}, "flows": {"tests"}}


def imported_packages(source: str) -> set[str]:
    """Names of the top-level packages that a module imports anywhere in its text."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_imports_inside_functions_are_found():
    assert imported_packages("import a.b\ndef f():\n    from c.d import e") == {"a", "c"}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_each_package_imports_only_what_it_may(package):
    modules = sorted((PROJECT / package).rglob("*.py"))
    assert modules
    for module in modules:
        wrong = imported_packages(module.read_text()) & FORBIDDEN[package]
        assert not wrong, f"{module.relative_to(PROJECT)} imports {wrong}"
