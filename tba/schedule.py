"""What changes from step to step: the learning rate and beta. A step's number decides both."""

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
    # 1 before the decay, and still above 0 in the last step: a step of size 0 would be computed in vain.
    left = min(1.0, (steps - step + 1) / (decay_steps + 1)) if decay_steps else 1.0
    if settings.learning_rate_schedule != "linear":
        left = (1 - math.cos(math.pi * left)) / 2
    return settings.learning_rate * left


def beta(settings: TrainSettings, step: int) -> float:
    """The KL coefficient in step 1, 2, …: from `beta` in a line to `beta_final` over `beta_steps`, then constant."""
    if settings.beta_final is None:
        return settings.beta
    part = min(1.0, (step - 1) / (settings.beta_steps or settings.steps))
    return settings.beta + (settings.beta_final - settings.beta) * part
