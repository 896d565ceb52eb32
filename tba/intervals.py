"""Confidence intervals of means, by Student's t."""

from collections.abc import Sequence

from scipy import stats


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean of at least two values."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
