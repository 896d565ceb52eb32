"""Comparisons by seeds: objectives at enforced lags, asynchronous and synchronous training."""
