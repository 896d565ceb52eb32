r"""math-verify in a process of its own: `python -m tba.tasks.verifier`.

A response such as \boxed{(10^{10})!} may take hours of algebra. math-verify's own time limit is a signal that only a
process's main thread may set, and that Python does not handle while it multiplies large integers. Here each comparison
sets the alarm of a process of its own, which the system then ends; the next comparison starts another process.
"""

import json
import logging
import signal
import subprocess
import sys
import threading

LIMIT_S = 5

log = logging.getLogger("tba.verifier")


class Verifier:
    """Compares answers in a child process, which starts with the first comparison and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()  # one comparison at a time

    def is_same(self, answer: str, response: str) -> bool:
        """Whether math-verify finds the answer in the response; False after `LIMIT_S`.

        Raises: RuntimeError: the process failed; its output says why.
        """
        with self._lock:
            process = self._process = self._process or _start()
            reply = ""
            try:
                process.stdin.write(json.dumps([answer, response]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                pass
            except BaseException:  # such as Ctrl-C: its late reply would be taken for that of the next comparison
                process.kill()
                self._process = None
                raise
            if reply:
                return json.loads(reply)
            self._process = None
            if (status := process.wait()) > 0:
                raise RuntimeError(f"math-verify's process ended with status {status}; its output is above")
            # SIGALRM: at the limit
            log.warning("%s ended the comparison with %r: %.200r", signal.Signals(-status).name, answer, response)
            return False


def _start() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    if not process.stdout.readline():
        raise RuntimeError(f"math-verify's process ended with status {process.wait()}; its output is above")
    return process


def main() -> None:
    """Answers each line [answer, response] with true or false; its first line says that it is ready."""
    replies, sys.stdout = sys.stdout, sys.stderr  # the libraries' output is no reply
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too; it ends with its parent
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        signal.alarm(LIMIT_S)
        answer, found = (parse(text, parsing_timeout=None) for text in json.loads(line))
        same = bool(verify(answer, found, timeout_seconds=None))
        signal.alarm(0)
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    main()
