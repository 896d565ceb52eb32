"""The command line: each command is in a file of its own. The working folder has the store `.tba/` and the stack.

Exit status: 0: done; 1: failed, with the reason and the end of the log; 2: bad input, nothing was started; 130: Ctrl-C.
Imports are inside the commands: `tba --help` and commands that only read a store import neither Prefect nor torch.
"""

import signal

import typer

from flows.cli import (
    compare,
    diversity,
    doctor,
    evaluate,
    export,
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
    app()


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt
