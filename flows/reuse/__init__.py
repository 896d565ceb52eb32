"""Stored trajectories used again: warm starts and rescoring."""
