"""Reuse of stored trajectories: warm starts and rescoring."""
