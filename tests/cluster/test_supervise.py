"""How a wait ends when one of many fails, or when somebody dies while it heeds news."""

from __future__ import annotations

import types

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from slimrl.cluster import supervise
from slimrl.cluster.supervise import ProcessDiedError, Supervisor
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


def heeding(monkeypatch, error: Exception) -> Supervisor:
    """A supervisor whose attendant's news are there at once, and raise `error`; the manager's watch fails then, too."""

    def act() -> None:
        raise error

    def get(ref: str) -> None:
        raise ActorDiedError

    def wait(refs, **_):
        return [ref for ref in refs if ref == "news"] or [ref for ref in refs if ref == "watch"], []

    monkeypatch.setattr(supervise, "ray", types.SimpleNamespace(wait=wait, get=get))
    supervisor = Supervisor(Patience(0, None))
    supervisor.watch("watch", lambda _: "the rollout manager died")
    supervisor.attend(types.SimpleNamespace(news=lambda: "news", act=act))
    return supervisor


def test_news_that_end_with_their_actor_name_who_died(monkeypatch):
    supervisor = heeding(monkeypatch, ActorDiedError())
    with pytest.raises(ProcessDiedError, match="^the rollout manager died$"):
        supervisor.get([Call()], Awaited("a call", lambda _: ""))


def test_news_that_fail_because_of_a_death_name_the_death(monkeypatch):
    supervisor = heeding(monkeypatch, RayTaskError("news", "", ValueError("an echo")))
    with pytest.raises(ProcessDiedError, match="^the rollout manager died$"):
        supervisor.get([Call()], Awaited("a call", lambda _: ""))
