"""Sums over the trajectories that a sync took in ("fresh"): reward, KL divergence, entropy, staleness."""

from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class Fresh:
    """Sums over trajectories, repeated responses included.

    The log-probabilities are the stored ones: under the distribution that each response was sampled from, with its own
    temperature, top_p and system prompt.
    """

    num_trajectories: int = 0
    num_response_tokens: int = 0
    num_cut: int = 0  # responses that ended at the length limit
    reward: float = 0.0
    ages_from: float = 0.0  # the policy steps that staleness counts from (storage/buffer.py)
    behavior_logprob: float = 0.0  # over all tokens
    reference_logprob: float = 0.0

    @classmethod
    def of(cls, trajectories: pa.Table, ages_from: np.ndarray) -> "Fresh":
        """The sums over rows of shards, at least one. ages_from: of each."""
        behavior, reference = (pc.list_flatten(trajectories[f"{name}_logprobs"]) for name in ("behavior", "reference"))
        return cls(
            num_trajectories=trajectories.num_rows,
            num_response_tokens=len(behavior),
            num_cut=pc.sum(pc.equal(trajectories["finish_reason"], "length"), min_count=0).as_py(),
            reward=pc.sum(trajectories["reward"]).as_py(),
            ages_from=float(ages_from.sum()),
            behavior_logprob=pc.sum(behavior).as_py(),
            reference_logprob=pc.sum(reference).as_py(),
        )

    def __add__(self, other: "Fresh") -> "Fresh":
        return Fresh(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def facts(self, step: int) -> dict[str, float]:
        """The columns of training_steps that follow from these sums, for a later step."""
        return {
            "fresh_reward_mean": self.reward / self.num_trajectories,
            "fresh_kl": (self.behavior_logprob - self.reference_logprob) / self.num_trajectories,
            "fresh_entropy": -self.behavior_logprob / self.num_response_tokens,
            "fresh_cut_share": self.num_cut / self.num_trajectories,
            "fresh_staleness": step - 1 - self.ages_from / self.num_trajectories,
        }


FRESH_COLUMNS = ("fresh_reward_mean", "fresh_kl", "fresh_entropy", "fresh_cut_share", "fresh_staleness")
