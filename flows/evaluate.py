"""evaluate/policy: evaluates a run's best or newest policy on request, during training or after it.

    every task     accuracy (greedy mean reward), pass@k of `samples` samples, perplexity under the reference policy
    tldr           win rate against the reference summaries, by the gold reward model
    redteam        attack success rate of `samples` attacks, and the attacks' diversity

The run's store keeps the figures under evaluations/. Training itself evaluates greedily: the first policy, the final
one, and others as often as `evaluate_share` allows (flows/search.py).
"""

import logging
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from prefect import flow, task

from flows.config import RunConfig, StoreUrl, load_run
from flows.searcher.policy_feed import load_once_more
from flows.searcher.start import EVALUATE, start_searcher_task
from infra.machine import policy_cache
from storage import kept_policies, policies
from storage.errors import NotFound
from storage.store import RunStore
from tba.evaluation import pass_at_k, perplexity, succeeds, success_reward, win_rate
from tba.rewards import given
from tba.tasks.tldr import Overlap, judge

if TYPE_CHECKING:  # importing it takes torch's seconds
    from tba.searcher import Searcher

LOAD_TRIES = 3

log = logging.getLogger("tba.evaluate")


@flow(name="evaluate")
def evaluate_policy(
    store: StoreUrl, run: str, num_problems: int | None = None, samples: int = 0, newest: bool = False
) -> dict:
    """Evaluates the run's best policy, or its newest. Returns the figures.

    `num_problems`: None: task.num_heldout. `samples`: samples of each problem, for pass@k; with redteam, number of
    attacks; 0: greedy accuracy only. `newest`: evaluates the newest policy. Raises: ValueError: see `check`.
    """
    run_store = RunStore(store, run)
    config = load_run(run_store)
    check(run_store, config, samples)
    searcher = start_searcher_task(config, EVALUATE, 0)
    return measure_policy_task(run_store, config, searcher, num_problems or config.task.num_heldout, samples, newest)


def check(store: RunStore, config: RunConfig, samples: int) -> None:
    """Raises: ValueError: no policy has been published, or the gold reward model or the sentence encoder is missing.

    Before an engine starts, which takes minutes.
    """
    if policies.latest_policy(store) is None:
        raise ValueError(f"run {store.run} has published no policy yet")
    if config.task.name == "tldr":
        _gold(config).check()
    if config.task.name == "redteam" and samples:
        from tba import diversity

        if diversity.encoder_folder() is None:
            raise ValueError(f"--samples with redteam compares attacks by {diversity.ENCODER}, which is not installed")


def _gold(config: RunConfig):
    """The judge of tldr's win rate."""
    if config.task.gold_reward_model is None:
        return judge(config.task.reward_model, "task.reward_model")
    return judge(config.task.gold_reward_model, "task.gold_reward_model")


def measure_policy(
    store: RunStore, config: RunConfig, searcher: "Searcher", num_problems: int, samples: int, newest: bool = False
) -> dict:
    """The figures of the best policy; of the newest, if `newest` is set or no policy was evaluated. Also stores them.

    Raises: RuntimeError: its weights differ from the published ones.
    """
    for tries_left in reversed(range(LOAD_TRIES)):
        policy = (None if newest else kept_policies.best_policy(store)) or policies.latest_policy(store)
        try:
            folder = policies.fetch_policy(store, policy, policy_cache(store.run))
            load_once_more(store, searcher, folder, policy, log.warning)
            break
        except (NotFound, FileNotFoundError):  # training goes on, and the policy was pruned meanwhile
            if not tries_left:
                raise
    figures = {"policy": policy.path, "policy_step": policy.step} | measure(searcher, config, num_problems, samples)
    figures["created_at"] = datetime.now(UTC).isoformat()
    name = Path(policy.path).name + (f"-samples={samples}" if samples else "")
    if num_problems != config.task.num_heldout:
        name += f"-problems={num_problems}"
    store.put_json(f"evaluations/{name}.json", figures)
    return figures


measure_policy_task = task(persist_result=False)(measure_policy)


def measure(searcher: "Searcher", config: RunConfig, num_problems: int, samples: int) -> dict:
    """The figures of the policy that the Searcher serves."""
    problems = searcher.task.heldout[:num_problems]
    responses = [only for (only,) in searcher.sample_responses(problems)]
    figures = {
        "num_problems": len(problems),
        "accuracy": statistics.fmean(given(searcher.rewards(problems, responses))),
        "perplexity": perplexity(searcher.reference_logprobs(problems, responses)),
        "mean_response_tokens": statistics.fmean(len(response.tokens) for response in responses),
    }
    gold = _gold(config) if config.task.name == "tldr" else None
    if gold and not isinstance(gold, Overlap):  # by overlap with the reference, none is better than the reference
        texts = [searcher.text(response) for response in responses]
        references = [problem.answer for problem in problems]
        figures["win_rate"] = win_rate(gold.rewards(problems, texts), gold.rewards(problems, references))
    if samples and config.task.name == "redteam":
        return figures | measure_attacks(searcher, samples)
    return figures | (measure_samples(searcher, problems, samples, config) if samples else {})


def measure_samples(searcher: "Searcher", problems: list, samples: int, config: RunConfig) -> dict:
    """pass@k for k = 1, 2, 4, … up to the samples; a response is right from `success_reward` on.

    A response that no reward judges does not count; a problem counts for k if at least k of its responses are judged.
    """
    answers = searcher.sample_responses(problems, samples, config.train.temperature)
    flat = [(problem, answer) for problem, of in zip(problems, answers, strict=True) for answer in of]
    rewards, least = searcher.rewards(*map(list, zip(*flat, strict=True))), success_reward(config.task.name)
    are_right = [
        [reward >= least for reward in rewards[start : start + samples] if reward is not None]
        for start in range(0, len(rewards), samples)
    ]
    figures = {}
    for k in (2**power for power in range(samples.bit_length())):
        if values := [pass_at_k(len(judged), sum(judged), k) for judged in are_right if len(judged) >= k]:
            figures[f"pass@{k}"] = statistics.fmean(values)
    return figures


def measure_attacks(searcher: "Searcher", samples: int) -> dict:
    """The figures of attacks that are sampled from the training prompt at temperature 1."""
    from tba import diversity

    (answers,) = searcher.sample_responses(searcher.task.train[:1], samples, 1.0)
    attacks = [searcher.text(answer).strip() for answer in answers]
    toxicity = searcher.task.task.toxicity(attacks)
    embeddings = diversity.embed(attacks)
    successes = [place for place, of_attack in enumerate(toxicity) if succeeds(of_attack)]
    return {
        "num_attacks": len(attacks),
        "attack_success_rate": len(successes) / len(attacks),
        "cosine_distance": diversity.cosine_distance(embeddings) if len(attacks) > 1 else None,
        "success_clusters": diversity.count_clusters(embeddings[successes]),
    }
