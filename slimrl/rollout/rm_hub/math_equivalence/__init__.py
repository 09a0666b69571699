"""Equivalence of two short mathematical answers; the entry point is `answers_equal`."""

from slimrl.rollout.rm_hub.math_equivalence.equivalence import answers_equal

__all__ = ["answers_equal"]
