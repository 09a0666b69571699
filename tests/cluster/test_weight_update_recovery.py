"""Replaced servers get weights as soon as possible; a weight update that loses a server restarts without it."""

from __future__ import annotations

import dataclasses

import pytest

from slimrl.cluster.engines import weight_update_recovery as resync_module
from slimrl.cluster.engines.health_monitor import EngineGroupStatus, RecoveryEvents
from slimrl.cluster.engines.weight_update_recovery import WeightUpdateRecovery
from slimrl.cluster.training.train_worker import RankFailedError
from slimrl.cluster.watchdog import WaitTarget
from slimrl.weights.update.topology import EngineEndpoint

OLD, NEW, OTHER = (EngineEndpoint(f"http://{name}", [gpu]) for gpu, name in enumerate(("old", "new", "other")))


class Calls:
    """Rollout manager, supervisor and trainers in one: records the calls and answers from a list."""

    def __init__(self, **answers: list) -> None:
        self.answers = answers
        self.made: list[tuple] = []
        self.failures: list[Exception] = []

    def engine_events(self, serial):
        return "engine_events", (serial,)

    def engine_status(self):
        return "engine_status", ()

    def begin_weight_update(self, only_waiting):
        return "begin_weight_update", (only_waiting,)

    def end_weight_update(self, urls, version):
        return "end_weight_update", (urls, version)

    def weight_update_failed(self, urls):
        return "weight_update_failed", (urls,)

    def waiting_for(self, what):
        return WaitTarget(what, lambda _: "")

    def get(self, refs, awaited):
        ((method, arguments),) = refs
        assert awaited.what
        self.made.append((method, *arguments))
        return [self.answers[method].pop(0) if method in self.answers else None]

    def weight_updates(self):
        return [call for call in self.made if call[0] in ("connect", "update")]

    def connect_engines(self, endpoints):
        self.made.append(("connect", [endpoint.url for endpoint in endpoints]))

    def update_weights(self, version):
        self.made.append(("update", version))
        if self.failures:
            raise self.failures.pop(0)


def recovery(calls: Calls, connected: list[EngineEndpoint]) -> WeightUpdateRecovery:
    return WeightUpdateRecovery(calls, calls, calls, connected)


def test_weight_update_that_loses_a_server_restarts_without_it_over_new_groups(caplog):
    calls = Calls(begin_weight_update=[[OLD, OTHER], [OTHER]], weight_update_failed=[[OLD.url]])
    calls.failures = [RankFailedError("http://old cannot be reached\na traceback")]
    recovery(calls, [OLD, OTHER]).sync_weights(5, calls.update_weights)
    assert calls.made == [
        ("begin_weight_update", False),
        ("update", 5),
        ("weight_update_failed", [OLD.url, OTHER.url]),
        ("begin_weight_update", False),
        ("connect", [OTHER.url]),
        ("update", 5),
        ("end_weight_update", [OTHER.url], "5"),
    ]
    message = "weight update 5 failed: http://old cannot be reached; retrying without the lost servers http://old"
    assert message in caplog.text


def test_weight_update_that_fails_with_all_servers_healthy_ends_the_run():
    calls = Calls(begin_weight_update=[[OLD]], weight_update_failed=[[]])
    calls.failures = [RankFailedError("the disk is full")]
    with pytest.raises(RankFailedError, match="the disk is full"):
        recovery(calls, [OLD]).sync_weights(5, calls.update_weights)


def test_only_the_new_server_is_updated_while_training_is_idle():
    calls = Calls(engine_status=[EngineGroupStatus([NEW], 1)], begin_weight_update=[[NEW]])
    with recovery(calls, [OLD, OTHER]).trainer_idle(4, pytest.fail):
        pass
    assert calls.made == [
        ("engine_status",),
        ("begin_weight_update", True),
        ("connect", [NEW.url]),
        ("update", 4),
        ("end_weight_update", [NEW.url], "4"),
    ]


def test_server_that_fails_again_before_its_update_is_not_updated():
    calls = Calls(engine_status=[EngineGroupStatus([NEW], 1)], begin_weight_update=[[]])
    with recovery(calls, [OLD]).trainer_idle(4, pytest.fail):
        pass
    assert calls.made == [("engine_status",), ("begin_weight_update", True)]


@pytest.mark.parametrize(("serving", "rescued"), [(1, 0), (0, 1)])
def test_offloaded_trainer_is_onloaded_only_for_the_last_server(serving, rescued):
    calls, rescues = Calls(engine_status=[EngineGroupStatus([NEW], serving)]), []
    with recovery(calls, [OLD]).trainer_idle(None, lambda: rescues.append(1)):
        pass
    assert len(rescues) == rescued
    assert calls.made == [("engine_status",)]


class CallsWithNews(Calls):
    """Delivers events in every wait like the supervisor: before the answer, and not from within an event handler."""

    def __init__(self, monkeypatch, arriving: dict[str, int], **answers: list) -> None:
        """`arriving` names the method in whose first wait events occur, and their number."""
        super().__init__(**answers)
        self.event_handler: WeightUpdateRecovery | None = None
        self.arriving = arriving
        monkeypatch.setattr(
            resync_module.ray, "get", lambda _: RecoveryEvents(self.received, [f"event {self.received}"])
        )
        self.received = 0

    def get(self, refs, awaited):
        answer = super().get(refs, awaited)
        if self.event_handler is not None and (count := self.arriving.pop(refs[0][0], 0)):
            self.received += count
            event_handler, self.event_handler = self.event_handler, None
            event_handler.events()
            event_handler.handle_events()
            self.event_handler = event_handler
        return answer


@pytest.mark.parametrize("wait", ["engine_status", "begin_weight_update", "end_weight_update"])
def test_events_during_a_weight_update_are_handled_after_it_once_per_server(monkeypatch, wait):
    standings = [EngineGroupStatus([NEW], 1), EngineGroupStatus([OTHER], 2)]
    calls = CallsWithNews(monkeypatch, {wait: 1}, engine_status=standings, begin_weight_update=[[NEW], [OTHER]])
    followed: list[int] = []
    made = WeightUpdateRecovery(calls, calls, calls, [OLD], lambda: followed.append(calls.received))
    calls.event_handler = made
    with made.trainer_idle(4, pytest.fail):
        pass
    assert calls.weight_updates() == [("connect", [NEW.url]), ("update", 4), ("connect", [OTHER.url]), ("update", 4)]
    assert followed == [1]
    assert [call for call in calls.made if call[0].endswith("_weight_update")] == [
        ("begin_weight_update", True),
        ("end_weight_update", [NEW.url], "4"),
        ("begin_weight_update", True),
        ("end_weight_update", [OTHER.url], "4"),
    ]


def test_last_servers_are_resynced_once_despite_another_failure(monkeypatch):
    calls = CallsWithNews(
        monkeypatch, {"engine_status": 2}, engine_status=[EngineGroupStatus([NEW], 0), EngineGroupStatus([], 1)]
    )
    calls.event_handler, rescues = recovery(calls, [OLD]), []
    with calls.event_handler.trainer_idle(None, lambda: rescues.append(1)):
        pass
    assert len(rescues) == 1


def test_replaced_server_at_a_connected_address_is_reconnected():
    calls = Calls(begin_weight_update=[[OLD], [dataclasses.replace(OLD, life=1)]])
    made = recovery(calls, [OLD])
    made.sync_weights(5, calls.update_weights)
    made.sync_weights(6, calls.update_weights)
    assert calls.weight_updates() == [("update", 5), ("connect", [OLD.url]), ("update", 6)]
