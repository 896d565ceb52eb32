"""The reference policy in a process of its own.

- It gives the vocabulary and the log-probabilities of a ReferencePolicy in this process, and its errors.
- Killed, it fails the call at hand; the next call starts another.
- A call that is interrupted leaves no answer for the next one.
- It ends with the process that started it, also if that one is killed.

python -m pytest tests/tba/test_reference_process.py
"""

import os
import signal
import string
import subprocess
import sys

import psutil
import pytest

from tba.reference_policy import ReferencePolicy
from tba.reference_process import ReferenceProcess
from tests.character_model import save_character_model

PROMPTS, RESPONSES = [[3, 4, 5], [6, 7]], [[8, 9], [10]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_character_model(tmp_path_factory.mktemp("model"), string.printable)


def child_of(process: psutil.Process) -> psutil.Process:
    """With the reference policy. Another child is multiprocessing's resource tracker."""
    living = [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    return next(child for child in living if "spawn_main" in " ".join(child.cmdline()))


class Interrupt(BaseException):
    pass


def interrupt(*_) -> None:
    raise Interrupt


@pytest.mark.slow
def test_an_interrupted_call_leaves_no_answer_for_the_next(folder):
    here, apart = ReferencePolicy(folder), ReferenceProcess(folder)
    assert apart.vocabulary_size == here.vocabulary_size  # it has started
    first = child_of(psutil.Process())
    first.suspend()  # in the middle of an answer, as it were
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(Interrupt):
        apart.logprobs(PROMPTS, RESPONSES, 0.7)
    signal.signal(signal.SIGALRM, before)
    assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE
    expected = [pytest.approx(of) for of in here.logprobs(RESPONSES, PROMPTS, 0.7)]
    assert apart.logprobs(RESPONSES, PROMPTS, 0.7) == expected


@pytest.mark.slow
def test_it_scores_as_in_this_process_and_starts_again_when_killed(folder):
    here, apart = ReferencePolicy(folder), ReferenceProcess(folder)
    assert apart.vocabulary_size == here.vocabulary_size
    expected = [pytest.approx(of) for of in here.logprobs(PROMPTS, RESPONSES, 0.7)]
    assert apart.logprobs(PROMPTS, RESPONSES, 0.7) == expected
    with pytest.raises(ValueError, match="zip"):
        apart.logprobs(PROMPTS, RESPONSES[:1], 0.7)
    child_of(psutil.Process()).kill()
    with pytest.raises(RuntimeError, match=r"process of the reference policy ended.* next try starts another"):
        apart.logprobs(PROMPTS, RESPONSES, 0.7)
    assert apart.logprobs(PROMPTS, RESPONSES, 0.7) == expected


SERVED = """
import sys
from tba.reference_process import ReferenceProcess
if __name__ == "__main__":
    reference = ReferenceProcess(sys.argv[1])
    print(reference.vocabulary_size, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ends"])
def test_it_ends_with_the_process_that_started_it(folder, tmp_path, is_killed):
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script, folder], env=environment, **pipes) as parent:
        assert int(parent.stdout.readline()) > 0
        child = child_of(psutil.Process(parent.pid))
        if is_killed:
            parent.send_signal(signal.SIGKILL)
        else:
            parent.stdin.close()
        gone, _ = psutil.wait_procs([child], timeout=60)
        assert gone == [child]
