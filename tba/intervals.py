"""Confidence intervals of means, by Student's t."""

from collections.abc import Sequence

from scipy import stats


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Half the width of the confidence interval of the mean of at least two values."""
    return float(stats.t.ppf((1 + confidence) / 2, len(values) - 1) * stats.sem(values))
