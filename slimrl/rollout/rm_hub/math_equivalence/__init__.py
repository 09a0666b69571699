"""Whether two short mathematical answers mean the same: `answers_equal` is the one door."""

from slimrl.rollout.rm_hub.math_equivalence.equivalence import answers_equal

__all__ = ["answers_equal"]
