"""Schedules of learning rate, beta, and the target's tempering: functions of the step's number."""

import math

from tba.config import TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """AdamW's step size in step 1, 2, … `settings.steps`: warm-up from zero, then `learning_rate_schedule`."""
    warmup, steps = settings.warmup_steps, settings.steps
    if step <= warmup:
        return settings.learning_rate * step / warmup
    match settings.learning_rate_schedule:
        case "constant":
            decay_steps = 0
        case "linear" | "cosine":
            decay_steps = steps - warmup
        case "warmup-stable-decay":
            decay_steps = min(settings.decay_steps, steps - warmup)
    # 1 before the decay, and still above 0 in the last step: a step of size 0 would have no effect.
    left = min(1.0, (steps - step + 1) / (decay_steps + 1)) if decay_steps else 1.0
    if settings.learning_rate_schedule != "linear":
        left = (1 - math.cos(math.pi * left)) / 2
    return settings.learning_rate * left


def tempering(settings: TrainSettings, step: int) -> tuple[float, float]:
    """Factors of log p_ref and of the reward in step 1, 2, …: 1 and 1 by default.

    The target is exp((log p_ref / g + r / beta) / T). T falls in a line from `reward_tempering` to 1, g goes from 1 to
    `fluency_temperature` (red-teaming: arXiv 2405.18540, and its code).
    """
    T = _line(settings.reward_tempering, 1.0, settings.reward_tempering_steps or settings.steps, step)
    g = _line(1.0, settings.fluency_temperature, settings.fluency_steps or settings.steps, step)
    return 1 / (g * T), 1 / T


def _line(first: float, last: float, steps: int, step: int) -> float:
    return first + (last - first) * min(1.0, (step - 1) / steps)


def beta(settings: TrainSettings, step: int) -> float:
    """The KL coefficient in step 1, 2, …: from `beta` in a line to `beta_final` over `beta_steps`, then constant."""
    if settings.beta_final is None:
        return settings.beta
    return _line(settings.beta, settings.beta_final, settings.beta_steps or settings.steps, step)
