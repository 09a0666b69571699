"""Which objects are garbage-collected between two rollouts."""

import gc
import weakref

from slimrl.rollout.async_utils import collect_between_rollouts


class Knot:
    """References itself."""

    def __init__(self) -> None:
        self.me = self


def test_full_gc_runs_only_when_no_samples_are_held():
    old = Knot()
    gc.collect()
    gc.collect()  # now it is in the oldest generation
    young = Knot()
    watched = weakref.ref(old), weakref.ref(young)
    del old, young
    collect_between_rollouts(samples_are_held=True)
    assert [knot() is None for knot in watched] == [False, True]
    collect_between_rollouts(samples_are_held=False)
    assert [knot() is None for knot in watched] == [True, True]
