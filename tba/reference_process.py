"""The reference policy in a process of its own, which takes less time from an engine than a thread beside it does.

Before: tba/searcher.py asks for log-probabilities; after: tba/reference_policy.py computes them in that process.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.reference_policy import ReferencePolicy

Result = TypeVar("Result")

_reference: "ReferencePolicy"  # in that process


class ReferenceProcess:
    """A ReferencePolicy in another process. That process starts on the first use, and ends with this one."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self._process: ProcessPoolExecutor | None = None

    @property
    def vocabulary_size(self) -> int:
        """As of ReferencePolicy. Raises: RuntimeError: the process ended; the next use starts another."""
        return self._call(_vocabulary_size)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """As of ReferencePolicy. Raises: RuntimeError: the process ended; the next use starts another."""
        return self._call(_logprobs, prompts, responses, temperature)

    def _call(self, function: Callable[..., Result], *arguments) -> Result:
        if self._process is None:
            self._process = ProcessPoolExecutor(1, get_context("spawn"), _begin, (self._folder,))
        try:
            return self._process.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            self._process = None
            raise RuntimeError(
                "the process of the reference policy ended: it was killed, perhaps for lack of memory, or failed to "
                "start; the next round starts another"
            ) from error


def _begin(folder: str | Path) -> None:
    from tba.reference_policy import ReferencePolicy

    global _reference
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it comes to both; the Searcher ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reference = ReferencePolicy(folder)


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _vocabulary_size() -> int:
    return _reference.vocabulary_size


def _logprobs(*arguments) -> list[list[float]]:
    return _reference.logprobs(*arguments)
