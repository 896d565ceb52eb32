"""What the fuzzing tests share: inputs that are counted, repeatable and limited in time."""

import contextlib
import faulthandler
import functools
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from storage.errors import StoreError

DEADLINE_S = 10.0  # on a machine that others keep busy; an input takes milliseconds
LIMIT_S = 240.0
DECLARED = (StoreError, ValueError)
tried: Counter[str] = Counter()  # inputs, by test


@pytest.fixture(autouse=True)
def no_hang():
    """A loop in C answers no signal: after LIMIT_S the process ends with a traceback of where it was."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def fuzzed(num_inputs: int, **strategies) -> Callable:
    """The test with that many inputs, each counted and within the deadline."""

    def decorated(test: Callable) -> Callable:
        @functools.wraps(test)
        def counted(**arguments) -> None:
            tried[test.__module__] += 1
            with within(DEADLINE_S):
                test(**arguments)

        profile = settings(
            max_examples=num_inputs,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        return profile(given(**strategies)(counted))

    return decorated


@contextlib.contextmanager
def within(seconds: float):
    def too_slow(*_) -> None:
        raise AssertionError(f"an input took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "0", "../../x", "NaN", "9" * 400, "\x1b[2J", "\ud800", "null"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
WORDS = st.text(max_size=30)
