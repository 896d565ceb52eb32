"""Confidence intervals of means, by Student's t."""

import functools
import math
import statistics
from collections.abc import Sequence

from scipy import stats


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Half the width of the confidence interval of the mean of at least two values."""
    return _quantile((1 + confidence) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@functools.cache
def _quantile(probability: float, degrees_of_freedom: int) -> float:
    return float(stats.t.ppf(probability, degrees_of_freedom))
