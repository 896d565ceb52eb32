"""Sources of problems: a JSONL or Parquet file, a Hugging Face dataset, or a Python function that returns rows.

Rows are mappings from column to value. Each has its location, so that an error can name it.
"""

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tba.imports import FILES, is_function_name, is_users_own, load_function
from tba.tasks.base import Problem

HELDOUT_ONE_IN = 10  # share of the problems held out where a dataset comes without a test split

Rows = Iterable[tuple[str, Mapping]]


def read_rows(data: str, columns: Sequence[str], config: str | None = None) -> tuple[Rows, Rows | None]:
    """Training rows, and the held-out ones of a dataset that has a test (or validation) split.

    Args: data: a .jsonl or .parquet file, `module:function`, or a Hugging Face dataset, loaded with its `config`.
        columns: the columns that every row must have.
    Raises: ValueError: the data is missing or cannot be read; when iterated: a row is broken or lacks a column.
    """
    if is_function_name(data):
        train, heldout = _call(data), None
    elif data.endswith(FILES) or Path(data).is_file():
        train, heldout = _read_file(Path(data), columns), None
    else:
        train, heldout = _read_hub(data, columns, config)
    return _checked(train, columns), None if heldout is None else _checked(heldout, columns)


def split(problems: Mapping[str, Problem], heldout: Mapping[str, Problem] | None, data: str) -> tuple[list, list]:
    """Problems to train on and held-out ones, by prompt_id. None: one in `HELDOUT_ONE_IN` is held out, rounded up.

    Held out are the problems with the smallest prompt_ids, which are hashes, so the order of the data does not matter;
    nor does it for the order of the held-out ones.
    Raises: ValueError: one of the two would be empty.
    """
    if heldout is None:
        chosen = sorted(problems)[: math.ceil(len(problems) / HELDOUT_ONE_IN)]
        heldout = {prompt_id: problems[prompt_id] for prompt_id in chosen}
    train = [problem for prompt_id, problem in problems.items() if prompt_id not in heldout]
    if not train or not heldout:
        raise ValueError(
            f"task.data: {data} gives {len(train)} problems to train on and {len(heldout)} to hold out; "
            "each needs at least one, so give at least two different questions"
        )
    # Evaluation takes the first ones, and the data may be sorted by subject.
    return train, [heldout[prompt_id] for prompt_id in sorted(heldout)]


def load_problems(
    data: str, columns: Sequence[str], problem: Callable[[Mapping, str], Problem], config: str | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and held-out ones; of rows with one prompt_id, the last counts.

    Args: data, columns, config: as of `read_rows`. problem: makes one of a row and the row's location.
    Raises: ValueError: as `read_rows` and `split`.
    """

    def by_id(rows: Rows) -> dict[str, Problem]:
        return {made.prompt_id: made for made in (problem(row, where) for where, row in rows)}

    train, heldout = read_rows(data, columns, config)
    return split(by_id(train), None if heldout is None else by_id(heldout), data)


def digest(text: str) -> str:
    """A prompt_id: the same on every machine."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def text_of(row: Mapping, column: str, where: str) -> str:
    """The row's value, which must be text. Raises: ValueError."""
    if not isinstance(row[column], str):
        raise ValueError(f"task.data: {where}: {column} is {row[column]!r}; it must be text")
    return row[column]


def _checked(rows: Rows, columns: Sequence[str]) -> Rows:
    for where, row in rows:
        if not hasattr(row, "keys"):  # a row of a pandas table has them, and is no Mapping
            raise ValueError(
                f"task.data: {where} is {row!r:.80} ({type(row).__name__}); each is a mapping from column to value. "
                'Of a pandas table give .to_dict("records"), of a dataset with splits one of them, such as ["train"]'
            )
        for column in columns:
            if column not in row:
                raise ValueError(f"task.data: {where} has no column {column!r}, only {', '.join(row) or 'none at all'}")
        yield where, row


def _read_file(file: Path, columns: Sequence[str]) -> Rows:
    if not file.is_file():
        raise ValueError(f"task.data: there is no file {file}; give a JSONL file with {' and '.join(columns)}")
    return _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)


def _read_jsonl(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
                _check_text(row, line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"task.data: {where} is not JSON ({error}); each line is one object") from error
            if not isinstance(row, dict):
                raise ValueError(f"task.data: {where} is not an object, but {line[:40]!r}; each line is one object")
            yield where, row


def _check_text(row: object, line: bytes) -> None:
    """Raises: UnicodeEncodeError: half of a surrogate pair, which JSON may have and a text may not."""
    if b"\\u" in line:
        json.dumps(row, ensure_ascii=False).encode()


def _read_parquet(file: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"task.data: {file} is not a Parquet file ({error})") from error
    return ((f"{file}, row {number}", row) for number, row in enumerate(rows))


def _read_hub(dataset: str, columns: Sequence[str], config: str | None) -> tuple[Rows, Rows | None]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(
            f"task.data: {dataset!r} is no .jsonl or .parquet file, and all else needs the package datasets, which is "
            "not installed; install it, or tba's extra tasks"
        ) from error
    try:
        splits = load_dataset(dataset, config)
    except Exception as error:  # datasets raises exceptions of its own, of the hub and of the network
        raise ValueError(
            f"task.data: the dataset {dataset!r} cannot be loaded here ({type(error).__name__}: {error}); give a local "
            f"JSONL file with {' and '.join(columns)} instead"
        ) from error
    if "train" not in splits:
        raise ValueError(
            f"task.data: the dataset {dataset!r} has no split train, but {', '.join(splits)}; give a module:function "
            "that returns the rows of one"
        )
    train, heldout = splits["train"], splits.get("test", splits.get("validation"))

    def located(name: str, rows: Iterable[Mapping]) -> Rows:
        return ((f"{dataset}, {name} row {number}", row) for number, row in enumerate(rows))

    return located("train", train), None if heldout is None else located("held-out", heldout)


_ROWS = re.compile(r"list|Iter|Sequence|Dataset", re.IGNORECASE)


def _call(name: str) -> Rows:
    """The rows that a user's function returns: a list, or a dataset."""
    rows = load_function(name, "task.data")
    if not is_users_own(name) and not _ROWS.search(str(inspect.signature(rows).return_annotation)):
        raise ValueError(
            f"task.data: {name} is a package's function, and only one that is annotated to return a list, an Iterable "
            "or a Dataset is called. Write a function in a file of the working folder that calls it"
        )
    try:
        return [(f"{name}, row {number}", row) for number, row in enumerate(rows())]
    except Exception as error:  # the function is the user's: it may raise anything
        raise ValueError(f"task.data: {name} failed ({type(error).__name__}: {error})") from error
