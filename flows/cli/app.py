"""The command line. A command is in the file of its name; up and down in stack.py, stop and searchers in steer.py.

The working folder has the store `.tba/` and the stack.

Exit status: 0: done; 1: failed, with the reason and the end of the log; 2: bad input or a store that
cannot be read, so nothing was started; 130: Ctrl-C.
Imports are inside the commands: `tba --help` and commands that only read a store import neither Prefect nor torch.
"""

import logging
import os
import signal
import sys
import threading

import typer

from flows.cli import (
    compare,
    diversity,
    doctor,
    evaluate,
    export,
    plan,
    report,
    rescore,
    runs,
    show,
    sql,
    stack,
    steer,
    train,
    verify,
    watch,
)
from flows.report.text import log_printable

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training of language models by Trajectory Balance.",
)
for part in (
    stack,
    train,
    runs,
    show,
    watch,
    steer,
    sql,
    rescore,
    verify,
    export,
    report,
    diversity,
    evaluate,
    plan,
    compare,
    doctor,
):
    app.add_typer(part.app)


def main() -> None:
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # `timeout` and a closing terminal end a run in order, as Ctrl-C does
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    log_printable(logging.WARNING, "%(message)s", ("storage", "flows", "tba", "infra"))
    try:
        app()
    except SystemExit as end:
        _end_beside_threads(end)
        raise


def _end_beside_threads(end: SystemExit) -> None:
    """Ends the process at once if a thread is still at work that nothing waits for.

    If it outlived the interpreter, DuckDB would print a page about leaked objects.
    """
    if any(thread.name == "unawaited" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt
