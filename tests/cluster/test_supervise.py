"""How a wait for many ends when one of them fails."""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError

from slimrl.cluster import supervise
from slimrl.cluster.supervise import Supervisor
from slimrl.cluster.watchdog import Awaited, Patience


class Call:
    """A call on one rank, and whether somebody takes its result when it comes."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.taken = failure, False

    def future(self) -> None:
        self.taken = True


class OneAfterTheOther:
    """Ray, with calls that return in their order."""

    def wait(self, refs, num_returns, timeout):
        return refs[:1], refs[1:]

    def get(self, refs):
        if isinstance(refs, list):
            return [0] * len(refs)
        if refs.failure is not None:
            raise refs.failure


@pytest.mark.parametrize("failed", [True, False])
def test_the_failures_of_the_other_ranks_are_taken_too_though_nobody_reads_them(monkeypatch, failed):
    monkeypatch.setattr(supervise, "ray", OneAfterTheOther())
    failure = RayTaskError("call", "a traceback of 100 lines", ValueError("no server")) if failed else None
    calls = [Call(), Call(failure), Call(failure)]
    awaited, supervisor = Awaited("the push", lambda _: ""), Supervisor(Patience(0, None))
    if failed:
        with pytest.raises(ValueError, match="no server"):
            supervisor.get(calls, awaited)
    else:
        assert supervisor.get(calls, awaited) == [0, 0, 0]
    assert [call.taken for call in calls] == [failed] * 3
