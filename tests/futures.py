"""For tests of work in threads: a result that is there already, and a wait."""

import time
from collections.abc import Callable
from concurrent.futures import Future


def done(result: object) -> Future:
    """In place of a copy that a Trainer makes beside its next step."""
    future: Future = Future()
    future.set_result(result)
    return future


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
