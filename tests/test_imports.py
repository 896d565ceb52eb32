"""Who may import whom, and what is where.

Claims
- flows/ imports tba, storage and infra; infra imports storage; tba and storage import none of the others; none of them
  imports tests
- inside flows/, imports go down only, from the command line to the configuration (`ORDER`)
- no file imports a file that imports it, however long the way
- the wheel has every package
- the top level of flows/ is the flows, each of which defines a flow, and the configuration; every room is in `ORDER`

Read from the source, so imports inside functions count too. Run: pytest tests/test_imports.py
"""

import ast
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
MAY_IMPORT = {
    "flows": {"infra", "storage", "tba"},
    "infra": {"storage"},
    "storage": set(),
    "tba": set(),
}
FLOWS = {"train", "search", "ranks", "evaluate", "maintain", "analyze"}
# Each row imports from rows below it only, and nothing from its own; a room's files import each other.
ORDER = [
    {"cli"},
    {"train", "search", "ranks", "evaluate", "maintain", "analyze", "compare", "plan"},
    {"run"},
    {"searcher", "trainer", "reuse"},
    {"report"},
    {"config"},
]
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}


def imported_modules(source: str) -> set[str]:
    """Full names of all that a module imports anywhere in its text: `from a import b` is a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of_flows(name: str) -> str:
    """flows.run.searchers.Searchers -> run"""
    return name.split(".")[1]


def wrong_imports(place: str, source: str) -> list[str]:
    """Of a module in `place` of flows/, the imports that do not go down."""
    ours = {name for name in imported_modules(source) if name.startswith("flows.")}
    others = {name for name in ours if part_of_flows(name) != place}
    return sorted(name for name in others if RANKS[part_of_flows(name)] <= RANKS[place])


def defines_a_flow(source: str) -> bool:
    """Whether a function of the module is decorated with Prefect's `flow`."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    decorators = [ast.unparse(decorator) for function in functions for decorator in function.decorator_list]
    return any(decorator.partition("(")[0] == "flow" for decorator in decorators)


def modules(folder: str) -> list[Path]:
    return sorted((PROJECT / folder).rglob("*.py"))


def imports_of_modules() -> dict[str, set[str]]:
    """By module of ours the modules of ours that it imports."""
    paths = {path.relative_to(PROJECT).with_suffix(""): path for package in MAY_IMPORT for path in modules(package)}
    sources = {".".join(name.parts).removesuffix(".__init__"): path.read_text() for name, path in paths.items()}

    def module_of(name: str) -> str | None:
        return next((found for found in (name, name.rpartition(".")[0]) if found in sources), None)

    return {module: {module_of(name) for name in imported_modules(text)} - {None} for module, text in sources.items()}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules that import each other in a circle, or reach one; empty if there is none."""
    left = dict(imports)
    while leaves := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in leaves:
            del left[module]
    return sorted(left)


def test_imports_inside_functions_are_found():
    assert imported_modules("import a.b\ndef f():\n    from c.d import e") == {"a.b", "c.d.e"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_package_imports_only_what_it_may(package):
    forbidden = {*MAY_IMPORT, "tests", "docs"} - MAY_IMPORT[package] - {package}
    assert modules(package)
    for module in modules(package):
        imported = {name.partition(".")[0] for name in imported_modules(module.read_text())}
        assert not imported & forbidden, f"{module.relative_to(PROJECT)} imports {imported & forbidden}"


def test_the_wheel_has_every_package():
    listed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(PROJECT) for package in MAY_IMPORT for path in modules(package)}
    assert {".".join(folder.parts) for folder in folders} | {"storage.sql"} == set(listed)


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_by_a_detour():
    assert circle(imports_of_modules()) == []


def test_an_import_that_does_not_go_down_is_found():
    assert wrong_imports("run", "def f():\n    from flows.cli import console") == ["flows.cli.console"]
    assert wrong_imports("trainer", "from flows.searcher.start import x") == ["flows.searcher.start.x"]
    assert wrong_imports("run", "from flows.run import a\nfrom flows.config import b\nfrom flows.report import c") == []


def test_imports_inside_flows_go_down():
    for module in modules("flows"):
        place = module.relative_to(PROJECT / "flows").parts[0].removesuffix(".py")
        if place != "__init__":
            wrong = wrong_imports(place, module.read_text())
            assert not wrong, f"{module.relative_to(PROJECT)} imports {wrong}; allowed, from above to below: {ORDER}"


def test_every_file_of_flows_is_in_its_room():
    top = {path.stem for path in (PROJECT / "flows").glob("*.py")}
    assert top == FLOWS | {"config", "__init__"}, "the top level of flows/ is the flows and the configuration"
    rooms = {module.parent.relative_to(PROJECT / "flows").as_posix() for module in modules("flows")} - {"."}
    assert rooms == set(RANKS) - FLOWS - {"config"}, "a room that ORDER does not have, or the other way round"


def test_a_flow_is_recognised():
    assert defines_a_flow('@flow(name="a")\ndef a(): ...')
    assert not defines_a_flow("@task\ndef a(): ...")


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_every_module_at_the_top_of_flows_defines_a_flow(name):
    assert defines_a_flow((PROJECT / "flows" / f"{name}.py").read_text())
