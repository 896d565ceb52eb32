"""Functions of rewards and data that settings name as `module:function`, from the working folder or a package.

A configuration may come from other people, because run.json is in a store. So modules of Python's standard library
(`os:system`) and of this project are refused before anything is imported. A package's function is called only if its
signature is that of a reward, because packages also have functions that start processes (docs/security.md).
"""

import functools
import importlib
import sys
from pathlib import Path

OURS = {"flows", "infra", "storage", "tba"}
OF_THE_REPOSITORY = {"build", "docs", "tests"}  # in the working folder of a checkout, but not the user's
FILES = (".jsonl", ".parquet")


def is_function_name(data: str) -> bool:
    """Whether `task.data` names a function, not a file or a dataset."""
    return ":" in data and not data.endswith(FILES) and not Path(data).is_file()


def check_function_name(name: str, field: str) -> None:
    """Imports nothing. Raises: ValueError: such a function may not be imported; the message begins with `field`."""
    module, _, function = name.partition(":")
    parts = [*module.split("."), function]
    if not all(part.isidentifier() for part in parts):
        others = "a local .jsonl or .parquet file, or a Hugging Face dataset" if field == "task.data" else "or task"
        raise ValueError(f"{field}: got {name!r}; write module:function, such as my_module:my_function, {others}")
    if any(part.startswith("__") for part in parts):
        raise ValueError(f"{field}: got {name!r}; a name that begins with '__' is Python's own. Name a function")
    if parts[0] in OURS:
        raise ValueError(
            f"{field}: got {name!r}; {parts[0]} is a part of this project, which is not allowed. Write a function in a "
            "file of the working folder"
        )
    if _is_pythons(parts[0]):
        raise ValueError(
            f"{field}: got {name!r}; {parts[0]} is in Python's standard library. Name a function of the working folder "
            f"or of an installed package; if {parts[0]}.py is a file of yours, give it another name"
        )
    folder = Path.cwd()
    for part in parts[:-1]:
        folder /= part
        if folder.is_dir() and any(next(folder.glob(f"{depth}run.json"), None) for depth in ("", "*/", "*/*/")):
            raise ValueError(
                f"{field}: got {name!r}; {folder} is in a store, whose files may be other people's. Write a function "
                "in a file of the working folder"
            )


def load_function(name: str, field: str):
    """The function called `module:function`.

    Raises: ValueError: it may not be imported, or there is none; the message begins with `field`.
    """
    check_function_name(name, field)
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with `python -m`: modules in the working folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module's code is the user's: it may raise anything
        raise ValueError(f"{field} {name}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ValueError(
            f"{field} {name}: {module_name} has no function {function_name!r}; it has {', '.join(own) or 'none'}"
        )
    home = _home(function)
    if _is_pythons(home.partition(".")[0]):
        raise ValueError(
            f"{field} {name}: {function_name} is imported there from {home}, of Python's standard library. Name a "
            "function that is defined in the working folder or in an installed package"
        )
    return function


def is_users_own(name: str) -> bool:
    """Whether a loaded `module:function` is a file of the working folder that the user has written."""
    module = name.partition(":")[0]
    package, *inner = module.split(".")
    file = getattr(sys.modules.get(module), "__file__", None)  # its package may have no __init__.py
    if package in OF_THE_REPOSITORY or file is None:
        return False
    folders = list(Path(file).parents)
    depth = len(inner) + (Path(file).name == "__init__.py")
    installed = any(any(folder.glob("*.dist-info")) or any(folder.glob("*.egg-info")) for folder in folders[:depth])
    return not installed and folders[depth : depth + 1] == [Path.cwd()]


def _is_pythons(package: str) -> bool:
    """Whether the package is the standard library's, and no file of the working folder replaces it."""
    if package not in sys.stdlib_module_names and package != "test":  # CPython's tests, which it does not list
        return False
    folder, loaded = Path.cwd(), sys.modules.get(package)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return file is None or folder not in list(Path(file).parents)[:2]
    return not (folder / f"{package}.py").is_file() and not (folder / package / "__init__.py").is_file()


def _home(function) -> str:
    """The module that defines a function; for a functools.partial, that of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""
