"""How well does a Searcher fill its engine? `make bench-search`: beside bare vLLM with the same requests.

    ROUNDS=6 TURNS=3 make bench-search
    PROMPTS=16 SAMPLES=16 LONGEST=1024 MODEL=<folder> make bench-search

SmolLM2-135M-Instruct, rounds of 16 prompts and 4 responses, of 4 to 256 tokens (geometric), a reward of 2 ms each. The
reference policy is in a process of its own, or on the GPU. Four sides, in one process and on one engine. `rounds` comes
once; then the others take turns, because a machine's speed may change within minutes:

    bare      vLLM's own queue has all requests from the start
    beside    the same, and another thread scores each round as soon as its requests are sampled, as in `ahead`
    rounds    one round after the other: the engine waits for its longest response, and for scoring
    ahead     the next rounds' prompts wait in the engine, as in a run; a policy is loaded in the middle of each round

A side is measured from its first request until the last round is sampled; requests of later rounds wait until then, as
in a run. A line a turn, then one JSON object with means over turns:

    tokens_per_s             tokens a second of `ahead`, without its loads
    tokens_per_s_ratio       the same over those of `bare`, by turn
    ratio_to_beside          the same over those of `beside`
    half_widths              of both ratios' 95 % confidence intervals over turns (Student's t); null with one turn
    underfilled_share        of the time of `ahead`, without its loads: fewer than half of the sequences are busy
    underfilled_share_worst  the same, of the worst turn
    before                   both of `rounds`, its ratio to the mean of `bare`
    swap_pause_s             median time for which the engine does not sample because it loads a policy
"""

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median

from flows.compare.results import confidence_interval
from infra.memory import keep_freed_memory
from tba.config import SearchSettings
from tba.models import embedded_model
from tba.searcher import AHEAD, SampledRound

PROMPTS, SAMPLES = int(os.environ.get("PROMPTS", "16")), int(os.environ.get("SAMPLES", "4"))
SHORTEST, LONGEST = 4, int(os.environ.get("LONGEST", "256"))
MEAN = LONGEST * 3 // 16
REWARD_S = 0.002


class Slow:
    """Sums, with a reward that takes its time."""

    name, version, stop, max_response_tokens = "slow", "1", (), LONGEST

    def __init__(self) -> None:
        from tba.tasks.base import Problem

        self.train = tuple(Problem(f"p{n}", f"{n} + 17 = {n + 17}\n63 + {n} =", "") for n in range(1000))
        self.heldout = self.train[:1]

    def rewards(self, problems, responses):
        time.sleep(REWARD_S * len(responses))
        return [0.0] * len(responses)


def make_engine(folder: Path):
    from tba.vllm_engine import VllmEngine

    class Watched(VllmEngine):
        """Knows for each step when it began and ended, and how many responses were in it; and its pauses."""

        def __init__(self, *arguments, **limits) -> None:
            super().__init__(*arguments, **limits)
            self.steps, self.pauses = [], []

        def step(self):
            self._fill()
            busy = min(self._engine.get_num_unfinished_requests(), PROMPTS * SAMPLES)
            began = time.monotonic()
            found = super().step()
            self.steps.append((began, time.monotonic(), busy))
            return found

        def load(self, *policy):
            began = time.monotonic()
            served = super().load(*policy)
            self.pauses.append(time.monotonic() - began)
            return served

    limits = {"max_tokens": LONGEST + 32, "max_sequences": PROMPTS * SAMPLES, "seed": 0, "threads": 1}
    return Watched(folder, **limits, arguments={"gpu_memory_utilization": 0.6})


def make_searcher(engine, folder: Path):
    from transformers import AutoTokenizer

    from tba.engine import Sampling
    from tba.precision import default_device
    from tba.reference_policy import ReferencePolicy
    from tba.reference_process import ReferenceProcess
    from tba.rewards import RewardedTask
    from tba.searcher import Models, Searcher, SearcherIdentity

    class Long(Searcher):
        """Its responses are as long as they are told to be."""

        def _explored(self, chance: random.Random):
            length = min(LONGEST, SHORTEST + int(chance.expovariate(1 / (MEAN - SHORTEST))))
            return Sampling(SAMPLES, 1.0, 1.0, length, []), ""

    reference = ReferencePolicy(folder)
    if default_device() == "cpu":  # as start_searcher
        reference = ReferenceProcess(folder, prepare=keep_freed_memory)
    return Long(
        SearcherIdentity("s0", 0, "bench"),
        RewardedTask(Slow()),
        Models(AutoTokenizer.from_pretrained(folder), engine, reference),
        SearchSettings(prompts_per_round=PROMPTS, samples_per_prompt=SAMPLES),
        max_response_tokens=LONGEST,
        temperature=1.0,
    )


def measured(engine, began: float, ended: float) -> dict:
    """What the engine did from `began` to `ended`, by time.monotonic."""
    steps = [step for step in engine.steps if began <= step[0] and step[1] <= ended]
    filled = sum(end - start for start, end, busy in steps if busy >= PROMPTS * SAMPLES / 2)
    return {
        "tokens_per_s": sum(busy for *_, busy in steps) / (ended - began),
        "underfilled_share": 1 - filled / (ended - began),
        "seconds": ended - began,
    }


def run_bare(engine, searcher, rounds: range, scored: Sequence[SampledRound] = ()) -> dict:
    """`scored`: these rounds; each is scored in another thread as soon as its requests are sampled here."""
    followed = range(rounds.start, rounds.stop + AHEAD)  # in a run, too, requests wait behind the last round
    names = [f"{number}/{place}" for number in followed for place in range(PROMPTS * SAMPLES)]
    questions = [
        question for number in followed for question in searcher._prompts_of_round(number) for _ in range(SAMPLES)
    ]
    for name, question in zip(names, questions, strict=True):
        asked = {"prompt_token_ids": question.prompt_tokens}
        engine._engine.add_request(name, asked, engine._parameters(question.sampling))
    left = dict.fromkeys(rounds, PROMPTS * SAMPLES)  # requests of each round
    to_score, scoring = {sampled.number: sampled for sampled in scored}, []
    with ThreadPoolExecutor(1) as thread:
        began = time.monotonic()
        while any(left.values()):
            start = time.monotonic()
            finished = [int(output.request_id.split("/")[0]) for output in engine._engine.step()]
            engine.steps.append((start, time.monotonic(), PROMPTS * SAMPLES))
            for number in set(finished) & set(rounds):
                left[number] -= finished.count(number)
                if not left[number] and number in to_score:
                    scoring.append(thread.submit(searcher.score, to_score[number]))
        ended = time.monotonic()
        engine._engine.abort_request(names)
    for each in scoring:
        each.result()  # raises what failed
    return measured(engine, began, ended)


def run_rounds(engine, searcher, rounds: range, folder: Path | None) -> tuple[dict, list[SampledRound]]:
    """`folder`: of a policy that is loaded before each round; None: one round after the other, and no policy."""
    paused, began, sampled = len(engine.pauses), time.monotonic(), []
    for number in rounds:
        if folder and number > rounds[0]:
            searcher.load(folder, number)
        sampled.append(searcher.sample(number, ahead=folder is not None))
        ended = time.monotonic()
        searcher.score(sampled[-1])
    searcher.drop_rounds()
    return measured(engine, began, ended) | {"paused_s": sum(engine.pauses[paused:])}, sampled


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folder = Path(os.environ.get("MODEL") or embedded_model(Path(__file__).parents[2] / ".tba" / ".local" / "models"))
    engine = make_engine(folder)
    searcher = make_searcher(engine, folder)
    searcher.load(folder, 0)
    rounds = range(1, int(os.environ.get("ROUNDS", "6")) + 1)
    searcher.score(searcher.sample(0))  # warms up
    before, sampled = run_rounds(engine, searcher, rounds, None)
    print("rounds", json.dumps(before), flush=True)
    turns = []
    for _ in range(int(os.environ.get("TURNS", "3"))):
        bare, beside = run_bare(engine, searcher, rounds), run_bare(engine, searcher, rounds, sampled)
        turns.append(compared(bare, beside, run_rounds(engine, searcher, rounds, folder)[0]))
        print("turn", json.dumps(turns[-1]), flush=True)
    names = ("tokens_per_s_ratio", "ratio_to_beside")
    ratios = {name: confidence_interval([turn[name] for turn in turns]) for name in names}
    bare = fmean(turn["bare_tokens_per_s"] for turn in turns)
    print(
        json.dumps(
            {
                "tokens_per_s": fmean(turn["tokens_per_s"] for turn in turns),
                **{name: ratio.mean for name, ratio in ratios.items()},
                "half_widths": {name: ratio.half_width for name, ratio in ratios.items()},
                "underfilled_share": fmean(turn["underfilled_share"] for turn in turns),
                "underfilled_share_worst": max(turn["underfilled_share"] for turn in turns),
                "swap_pause_s": median(engine.pauses[1:]),
                "before": {
                    "tokens_per_s_ratio": before["tokens_per_s"] / bare,
                    "underfilled_share": before["underfilled_share"],
                },
            }
        )
    )


def compared(bare: dict, beside: dict, ahead: dict) -> dict:
    """The figures of one turn; the time of `ahead` is without its loads."""
    sampling_s = ahead["seconds"] - ahead["paused_s"]
    tokens_per_s = ahead["tokens_per_s"] * ahead["seconds"] / sampling_s
    return {
        "bare_tokens_per_s": bare["tokens_per_s"],
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_ratio": tokens_per_s / bare["tokens_per_s"],
        "ratio_to_beside": tokens_per_s / beside["tokens_per_s"],
        "underfilled_share": ahead["underfilled_share"] - ahead["paused_s"] / ahead["seconds"],
    }


if __name__ == "__main__":
    main()
