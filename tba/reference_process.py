"""The reference policy in a process of its own, so that an engine and scoring do not share an interpreter.

Before: tba/searcher.py asks for log-probabilities; after: tba/reference_policy.py computes them in that process.
"""

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path


class ReferenceProcess:
    """A ReferencePolicy in another process. That process starts on the first use, and ends with this one."""

    def __init__(self, folder: str | Path, prepare: Callable[[], object] | None = None) -> None:
        """`prepare`: a function of a module; that process calls it first."""
        self._folder, self._prepare = folder, prepare
        self._running: tuple[BaseProcess, Connection] | None = None
        self._lock = threading.Lock()

    @property
    def vocabulary_size(self) -> int:
        """As of ReferencePolicy. Raises: RuntimeError: the process ended; the next use starts another."""
        return self._ask(None)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """As of ReferencePolicy. Raises: RuntimeError: the process ended; the next use starts another."""
        return self._ask((prompts, responses, temperature))

    def _ask(self, asked: tuple | None):
        """asked: arguments of `logprobs`; None: for the vocabulary's size."""
        with self._lock:
            try:
                _, pipe = self._running = self._running or self._start()
                pipe.send(asked)
                found, fault = pipe.recv()
            except (EOFError, OSError) as error:
                self._end()
                raise RuntimeError(
                    "the process of the reference policy ended: it was killed, perhaps for lack of memory, or failed "
                    "to start; the next try starts another"
                ) from error
            except BaseException:  # an interrupt: the next call would take this one's answer for its own
                self._end()
                raise
        if fault is not None:
            raise fault
        return found

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = get_context("spawn").Pipe()
        arguments = (theirs, self._folder, self._prepare)
        process = get_context("spawn").Process(target=_serve, args=arguments, name="reference", daemon=True)
        process.start()
        theirs.close()  # the process alone has it, so its end is seen
        return process, ours

    def _end(self) -> None:
        if self._running:
            process, pipe = self._running
            self._running = None
            pipe.close()
            process.kill()
            process.join()


def _serve(pipe: Connection, folder: str | Path, prepare: Callable[[], object] | None) -> None:
    """Answers until the other end of the pipe is closed, which a killed process closes, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches both, and the other one ends this one
    if prepare:
        prepare()
    from tba.reference_policy import ReferencePolicy

    reference = ReferencePolicy(folder)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            asked = pipe.recv()
            try:
                answer = reference.vocabulary_size if asked is None else reference.logprobs(*asked), None
            except Exception as error:
                error.add_note("".join(traceback.format_exception(error)))
                answer = None, error
            pipe.send(answer)
