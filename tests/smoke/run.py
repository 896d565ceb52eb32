"""Every task through tba/train with the embedded model, its own grader or judge, a few steps each: `make smoke`.

Says for each run how many steps were trained and the reward's mean and components, and fails where one fell short. The
settings are as small as they can be: nothing is learnt here. GSM8K, MATH and TL;DR read problems of the same columns
from this folder, so that nothing is downloaded.
"""

import subprocess
import sys
import time
from pathlib import Path

from storage.queries import query
from storage.store import RunStore

STEPS = 5
HERE = Path(__file__).parent
SMALL = {
    "search.prompts_per_round": 4,
    "search.samples_per_prompt": 4,
    "searchers": 1,
    "sampling.prompts_per_batch": 2,
    "sampling.responses_per_prompt": 4,
    "sampling.min_size": 16,
    "task.num_heldout": 2,
    "task.max_response_tokens": 24,
    "train.checkpoint_interval": 100,
}
RUNS = {
    "arithmetic": {},
    "gsm8k": {"task.data": HERE / "gsm8k.jsonl"},
    "math": {"task.data": HERE / "math.jsonl"},
    "tldr": {"task.data": HERE / "tldr.jsonl", "task.missing_eos_reward": -1},
    "redteam": {
        "search.prompts_per_round": 1,
        "search.samples_per_prompt": 8,
        "sampling.prompts_per_batch": 1,
        "sampling.min_size": 8,
        "train.reward_tempering": 2,
    },
    "chain_sum": {"task.name": "reasoning_gym", "task.generator": "chain_sum"},
    "spell_backward": {"task.name": "reasoning_gym", "task.generator": "spell_backward"},
    "leg_counting": {"task.name": "reasoning_gym", "task.generator": "leg_counting"},
}


def main(names: list[str]) -> int:
    failed = []
    for name in names or RUNS:
        run = f"smoke-{name}-{int(time.time())}"
        settings = {"task.name": name} | SMALL | RUNS[name]
        command = [sys.executable, "-m", "flows.cli", "train", run, "--steps", str(STEPS)]
        command += [f"--set={key}={value}" for key, value in settings.items()]
        started = time.monotonic()
        status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        print(f"{name}: exit status {status} after {time.monotonic() - started:.0f} s", flush=True)
        if status or not report(run):
            failed.append(name)
    print(f"Failed: {', '.join(failed)}" if failed else "Every task trained.")
    return bool(failed)


def report(run: str) -> bool:
    """Prints what the run's store says; whether it took all its steps."""
    store = RunStore((Path.cwd() / ".tba").as_uri(), run)
    (steps,) = query(store, "SELECT count(*) FROM training_steps").column(0).to_pylist()
    rows = query(
        store,
        "SELECT count(*) AS trajectories, round(avg(reward), 3) AS reward, any_value(rewards) AS an_example "
        "FROM trajectories",
    ).to_pylist()
    print(f"  {steps} steps, {rows}", flush=True)
    return steps == STEPS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
