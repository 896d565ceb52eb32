"""Trajectory Balance with Asynchrony: the method. Imports neither flows nor storage."""
