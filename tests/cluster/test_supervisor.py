"""How a wait ends when one of many calls fails, or when a process dies while an event is handled."""

from __future__ import annotations

import types

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayTaskError

from slimrl.cluster import supervisor as supervise
from slimrl.cluster.supervisor import (
    ProcessDiedError,
    Supervisor,
    TrainNodeLostError,
    TrainWorkerDiedError,
    summarize_oom,
)
from slimrl.cluster.watchdog import WaitTarget, WatchdogConfig, WatchdogTimeoutError

RAYS_PAGE = """1 worker(s) were killed due to the node running low on memory.
Workers (tasks / actors) killed due to memory pressure (OOM),
Memory on the node (IP: 10.0.0.7, ID: 5c1d) was 29.84GB used / 31.25GB limit (0.954880)
Object store memory usage: [- objects spillable: 0]
train worker 1: (actor ID: 21, name=TrainWorker.__init__, pid=4711, actual memory used=11.52GB, worker ID=ab)
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io
Consider provisioning more memory on this node
"""


class Call:
    """A call on one rank, and whether its result was fetched."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.taken = failure, False

    def future(self) -> None:
        self.taken = True


class SequentialRay:
    """A fake ray whose calls return in their order."""

    def wait(self, refs, num_returns, timeout):
        return refs[:1], refs[1:]

    def get(self, refs):
        if isinstance(refs, list):
            return [0] * len(refs)
        if refs.failure is not None:
            raise refs.failure


def test_wait_for_calls_that_end_together_looks_at_each_a_few_times(monkeypatch):
    looks = []

    def wait(refs, num_returns, timeout):
        looks.append(len(refs))
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(supervise, "ray", types.SimpleNamespace(wait=wait, get=lambda refs: [0] * len(refs)))
    monkeypatch.setattr(Supervisor, "_raise_failure", lambda supervisor, ref: None)
    calls = [object() for _ in range(1000)]
    Supervisor(WatchdogConfig(0, None)).get(calls, WaitTarget("training", str))
    assert sum(looks) <= 4 * len(calls)  # one at a time: half a million


def test_slow_wait_names_unresponsive_nodes_first(monkeypatch):
    monkeypatch.setattr(supervise, "ray", types.SimpleNamespace(wait=lambda refs, **_: ([], refs)))
    silent = "node 10.0.0.2 has not answered on the network for 20 s"
    nodes = types.SimpleNamespace(unreachable=lambda: silent, lost=str, dead=str)
    supervisor = Supervisor(WatchdogConfig(0, 1e-9), nodes)
    with pytest.raises(
        WatchdogTimeoutError, match=f"waiting 0 s for the weight update: {silent}; rank 1 cannot be asked"
    ):
        supervisor.get([Call()], WaitTarget("the weight update", lambda _: "rank 1 cannot be asked"))


@pytest.mark.parametrize("failed", [True, False])
def test_errors_of_all_failed_ranks_are_collected(monkeypatch, failed):
    monkeypatch.setattr(supervise, "ray", SequentialRay())
    failure = RayTaskError("call", "a traceback of 100 lines", ValueError("no server")) if failed else None
    calls = [Call(), Call(failure), Call(failure)]
    awaited, supervisor = WaitTarget("the weight update", lambda _: ""), Supervisor(WatchdogConfig(0, None))
    if failed:
        with pytest.raises(ValueError, match="no server"):
            supervisor.get(calls, awaited)
    else:
        assert supervisor.get(calls, awaited) == [0, 0, 0]
    assert [call.taken for call in calls] == [failed] * 3


def test_death_that_ray_reports_is_handled_before_a_node_is_named_lost(monkeypatch):
    """Its spare one has been reserved when Ray reports the death: only the handler makes that known."""
    handled = []

    def wait(refs, **_):
        return refs[:1], refs[1:]

    def get(ref):
        if ref == "watch":
            raise ActorDiedError
        return [0] if isinstance(ref, list) else 0

    def handle(error: TrainWorkerDiedError) -> None:
        handled.append(error)
        supervisor.unwatch(["watch"])

    monkeypatch.setattr(supervise, "ray", types.SimpleNamespace(wait=wait, get=get))
    nodes = types.SimpleNamespace(
        unreachable=str, lost=lambda: "" if handled else "node b is silent", dead=lambda: "node b is lost"
    )
    nodes.dead_are_replaceable = lambda: True
    supervisor = Supervisor(WatchdogConfig(0, None), nodes)
    supervisor.watch("watch", lambda _: "rank 0 died", TrainWorkerDiedError)
    supervisor.set_loss_handler(handle)
    assert supervisor.get(["call"], WaitTarget("generation", lambda _: "")) == [0]
    (death,) = handled
    assert isinstance(death, TrainNodeLostError) and str(death) == "node b is lost: rank 0 died"


def watching(monkeypatch, error: Exception) -> Supervisor:
    """A supervisor with an event ready whose handler raises `error`; the watch on the manager fails afterwards."""

    def act() -> None:
        raise error

    def get(ref: str) -> None:
        raise ActorDiedError

    def wait(refs, **_):
        return [ref for ref in refs if ref == "news"] or [ref for ref in refs if ref == "watch"], []

    monkeypatch.setattr(supervise, "ray", types.SimpleNamespace(wait=wait, get=get))
    supervisor = Supervisor(WatchdogConfig(0, None))
    supervisor.watch("watch", lambda _: "the rollout manager died")
    supervisor.set_event_handler(types.SimpleNamespace(events=lambda: "news", handle_events=act))
    return supervisor


def test_event_call_that_ends_with_its_actor_names_the_dead_process(monkeypatch):
    supervisor = watching(monkeypatch, ActorDiedError())
    with pytest.raises(ProcessDiedError, match="^the rollout manager died$"):
        supervisor.get([Call()], WaitTarget("a call", lambda _: ""))


def test_event_call_that_fails_because_of_a_death_names_it(monkeypatch):
    supervisor = watching(monkeypatch, RayTaskError("news", "", ValueError("an echo")))
    with pytest.raises(ProcessDiedError, match="^the rollout manager died$"):
        supervisor.get([Call()], WaitTarget("a call", lambda _: ""))


@pytest.mark.parametrize(
    "error", [OutOfMemoryError(RAYS_PAGE), RayActorError(error_msg=RAYS_PAGE)], ids=["call", "actor"]
)
@pytest.mark.parametrize("watched", [True, False])
def test_out_of_memory_report_is_summarized_with_its_numbers(monkeypatch, error, watched):
    monkeypatch.setattr(supervise, "ray", SequentialRay())
    supervisor = Supervisor(WatchdogConfig(0, None))
    died = Call(error)
    if watched:
        supervisor.watch(died, lambda why: f"train worker rank 1 died: {why}")
    with pytest.raises(ProcessDiedError) as failure:
        supervisor.get([Call() if watched else died], WaitTarget("training on rollout 3", lambda _: ""))
    assert str(failure.value) == ("train worker rank 1 died: " if watched else "") + (
        "Ray killed process 4711, which had 11.5 GB, for lack of memory: 29.8 of the 31.2 GB of machine 10.0.0.7 were"
        " in use; give the machine more memory, or start fewer or smaller processes on it (--dry-run shows what each"
        " GPU needs); Ray's limit is RAY_memory_usage_threshold"
    )


def test_other_deaths_keep_the_ray_message():
    error = ValueError("the actor exited with code 3")
    assert summarize_oom(error) is error
    assert "RAY_memory" in str(
        summarize_oom(ValueError("killed due to the node running low on memory, in other words"))
    )
