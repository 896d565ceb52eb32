"""Generation beside its caller: a thread steps the engine while a Searcher scores what was sampled before.

Before: tba/searcher.py asks for batches; after: tba/engine.py samples them.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from tba.engine import Engine, Response, Sampling, ServedPolicy

SampledBatch = tuple[list[list[Response]], datetime]  # each prompt's responses, and when the last one was sampled


class Generator:
    """Samples batches of prompts. Several can be in the engine at once, and a policy is loaded between two steps.

    Only its thread uses the engine. A step puts the next one behind what callers have asked for meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._batches: dict[int, Future[SampledBatch]] = {}  # in the engine, by its number
        self._is_stepping = False  # a step is due

    def load(self, folder: Path, policy_step: int) -> ServedPolicy:
        """Serves the policy in `folder` from now on. Batches in flight go on with it, or with
        the adapters that they began with.

        If that fails, the engine may hold a part of the weights, so these batches are cancelled. Raises: its error.
        """
        return self._thread.submit(self._load, folder, policy_step).result()

    def start(
        self, prompts: list[list[int]], sampling: Sequence[Sampling], *, first: bool = False
    ) -> Future[SampledBatch]:
        """Begins a batch: `num_samples` responses to each prompt. `first`: before the prompts that wait already.

        The future raises the engine's error, or CancelledError: see `load` and `cancel`.
        """
        batch: Future[SampledBatch] = Future()
        self._thread.submit(self._start, batch, prompts, sampling, first)
        return batch

    def sample(self, prompts: list[list[int]], sampling: Sequence[Sampling]) -> list[list[Response]]:
        """`num_samples` responses to each prompt, before those of the batches that wait."""
        responses, _ = self.start(prompts, sampling, first=True).result()
        return responses

    def num_waiting(self) -> int:
        """Number of prompts that wait and have not begun. Waits for the step that is on."""
        return self._thread.submit(self._engine.num_waiting).result()

    def cancel(self) -> None:
        """Ends all batches without their responses."""
        self._thread.submit(self._cancel).result()

    def _load(self, folder: Path, policy_step: int) -> ServedPolicy:
        try:
            return self._engine.load(folder, policy_step)
        except BaseException:
            self._cancel()
            raise

    def _start(self, batch: Future, prompts: list[list[int]], sampling: Sequence[Sampling], first: bool) -> None:
        try:
            self._batches[self._engine.start(prompts, sampling, first=first)] = batch
        except BaseException as error:
            batch.set_exception(error)
            return
        self._step_soon()

    def _step_soon(self) -> None:
        if self._batches and not self._is_stepping:
            self._is_stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if not self._batches:
            return  # cancelled meanwhile
        try:
            for number, responses in self._engine.step().items():
                self._batches.pop(number).set_result((responses, datetime.now(UTC)))
        except BaseException as error:
            for batch in self._batches.values():
                batch.set_exception(error)
            self._batches.clear()
            self._engine.abort()
        self._step_soon()

    def _cancel(self) -> None:
        for batch in self._batches.values():
            batch.cancel()
            batch.set_running_or_notify_cancel()  # wakes who waits for it
        self._batches.clear()
        self._engine.abort()
