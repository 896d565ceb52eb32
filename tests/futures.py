"""A Future whose result is there already, in place of a copy that a Trainer makes beside its next step."""

from concurrent.futures import Future


def done(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
