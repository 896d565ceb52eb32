"""How sure a mean is, by Student's t."""

from collections.abc import Sequence

from scipy import stats


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of their mean; of two values at least."""
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
