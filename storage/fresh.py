"""Sums over the trajectories that a sync took in ("fresh"): reward, KL divergence, entropy, staleness."""

from dataclasses import asdict, dataclass

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
    policy_step: float = 0.0
    behavior_logprob: float = 0.0  # over all tokens
    reference_logprob: float = 0.0

    @classmethod
    def of(cls, trajectories: pa.Table) -> "Fresh":
        """The sums over rows of shards, at least one."""
        behavior, reference = (pc.list_flatten(trajectories[f"{name}_logprobs"]) for name in ("behavior", "reference"))
        return cls(
            num_trajectories=trajectories.num_rows,
            num_response_tokens=len(behavior),
            num_cut=pc.sum(pc.equal(trajectories["finish_reason"], "length"), min_count=0).as_py(),
            reward=pc.sum(trajectories["reward"]).as_py(),
            policy_step=pc.sum(trajectories["policy_step"]).as_py(),
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
            "fresh_staleness": step - 1 - self.policy_step / self.num_trajectories,
        }


FRESH_COLUMNS = ("fresh_reward_mean", "fresh_kl", "fresh_entropy", "fresh_cut_share", "fresh_staleness")
