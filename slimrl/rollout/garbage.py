"""How Python's garbage collector is set in a process that holds thousands of samples.

A collection walks through every list of the generations that it collects, and a sample is three lists with an entry per
token: with Python's own thresholds that takes more time than all other work on a rollout, and finds nothing, since
samples are freed by their reference counts. Cycles (tasks that failed, objects of the user's) are found all the same:
young ones after 50 000 allocations, what lived longer at the latest between two rollouts, when the samples are gone.
Where generation never ends they never are: what lived longer is left to Python's own count then.
Called by the rollout manager, whose process it is, and by benchmarks that stand for it.
"""

from __future__ import annotations

import gc

_THRESHOLDS = (50_000, 50, 10)  # Python's own: 700, 10, 10


def expect_many_samples() -> None:
    """To be called once, when the process has loaded what it needs: that is never walked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def collect_between_rollouts(*, samples_are_held: bool) -> None:
    """Collects everything, a few milliseconds where no samples are held; else what is young."""
    gc.collect(1 if samples_are_held else 2)
