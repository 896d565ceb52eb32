"""Which prompts teach most? On the testbed: `python -m tests.benchmarks.bench_prompts`; some ten minutes on one core.

Of 1.5 B prompts that a policy of `LAG` steps ago sampled K responses to, B are trained on: at random, or those whose
rewards differ first, as the replay buffer draws them (storage/mop.py). A line a configuration: greedy accuracy after
100 steps, mean over seeds with its 95 % interval; the last line is one JSON object.
"""

import json
from pathlib import Path

import torch

from flows.compare.results import confidence_interval
from tba import baselines, testbed
from tba.config import TrainSettings

LAG, STEPS, SEEDS, RATES = 8, 100, 6, (3e-3, 5e-3)
# B, K, whether prompts whose rewards differ come first, settings
ARMS = {
    "16 x 8, at random": (16, 8, False, {"adam_beta1": 0.9}),
    "16 x 8": (16, 8, True, {"adam_beta1": 0.9}),
    "16 x 8, beta_1 0.7": (16, 8, True, {"adam_beta1": 0.7}),
    "32 x 4": (32, 4, True, {"adam_beta1": 0.9}),
    "8 x 16": (8, 16, True, {"adam_beta1": 0.9}),
    "16 x 8, beta 0.1": (16, 8, True, {"adam_beta1": 0.9, "beta": 0.1}),
    "16 x 8, beta_2 0.98": (16, 8, True, {"adam_beta1": 0.9, "adam_beta2": 0.98}),
    "16 x 8, constant": (16, 8, True, {"adam_beta1": 0.9, "learning_rate_schedule": "constant"}),
}


def choosing(differing_first: bool):
    """The testbed's batch, chosen from one of 1.5 B prompts."""
    sampled = testbed.batch

    def batch(*policies_and_generator) -> baselines.Terms:
        wanted = testbed.B
        testbed.B = wanted * 3 // 2
        try:
            terms = sampled(*policies_and_generator)
        finally:
            testbed.B = wanted
        differ = terms.reward.amin(1) < terms.reward.amax(1)  # [1.5 B]
        order = differ.int().argsort(descending=True, stable=True) if differing_first else torch.arange(len(differ))
        return baselines.Terms(*(getattr(terms, name)[order[:wanted]] for name in baselines.Terms.__annotations__))

    return batch


def main() -> None:
    torch.set_num_threads(1)
    first, sampled, results = testbed.first_policy(Path(".tba/.local/testbed.safetensors")), testbed.batch, {}
    for rate in RATES:
        for name, (testbed.B, testbed.K, differing_first, settings) in ARMS.items():
            testbed.batch = sampled
            testbed.batch = choosing(differing_first)
            settings = TrainSettings(steps=STEPS, learning_rate=rate, **settings)
            accuracies = [testbed.train(first, settings, LAG, seed).accuracy for seed in range(SEEDS)]
            results[f"{name}, {rate:g}"] = accuracies
            print(f"{name:24}{rate:8g}   {confidence_interval(accuracies)}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
