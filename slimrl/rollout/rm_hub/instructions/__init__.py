"""Checks of instructions that a program can verify, in the manner of IFEval (Zhou et al., 2023) and IFBench.

Everything needed is here; nothing is fetched. `of_metadata` reads what a data set asks for, `followed` checks it.
"""

from slimrl.rollout.rm_hub.instructions.registry import followed, known_instructions, of_metadata

__all__ = ["followed", "known_instructions", "of_metadata"]
