"""Weights reach replaced servers at the first right moment, and weight updates that lose a server begin again without
it.
"""

from __future__ import annotations

import dataclasses

import pytest

from slimrl.cluster import engine_resync as joining_module
from slimrl.cluster.engine_resync import EngineResync
from slimrl.cluster.engines.engine_recovery import EngineGroupStatus, RecoveryEvents
from slimrl.cluster.training.train_group import RankFailedError
from slimrl.cluster.watchdog import WaitTarget
from slimrl.weights.update.topology import EngineEndpoint

OLD, NEW, OTHER = (EngineEndpoint(f"http://{name}", [gpu]) for gpu, name in enumerate(("old", "new", "other")))


class Calls:
    """The recovery, the supervisor and the trainers in one: writes down what is asked, and answers from a list."""

    def __init__(self, **answers: list) -> None:
        self.answers = answers
        self.made: list[tuple] = []
        self.failures: list[Exception] = []

    def ask(self, method, *arguments):
        return method, arguments

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


def resync(calls: Calls, connected: list[EngineEndpoint]) -> EngineResync:
    return EngineResync(calls.ask, lambda what: WaitTarget(what, lambda _: ""), calls, calls, connected)


def test_a_weight_update_that_loses_a_server_begins_again_without_it_over_new_groups(caplog):
    calls = Calls(begin_weight_update=[[OLD, OTHER], [OTHER]], weight_update_failed=[[OLD.url]])
    calls.failures = [RankFailedError("http://old cannot be reached\na traceback")]
    resync(calls, [OLD, OTHER]).sync_weights(5, calls.update_weights)
    assert calls.made == [
        ("begin_weight_update", False),
        ("update", 5),
        ("weight_update_failed", [OLD.url, OTHER.url]),
        ("begin_weight_update", False),
        ("connect", [OTHER.url]),
        ("update", 5),
        ("end_weight_update", [OTHER.url], "5"),
    ]
    assert "the weight update 5 lost http://old and begins again without: http://old cannot be reached" in caplog.text


def test_a_weight_update_that_fails_with_every_server_well_ends_the_run():
    calls = Calls(begin_weight_update=[[OLD]], weight_update_failed=[[]])
    calls.failures = [RankFailedError("the disk is full")]
    with pytest.raises(RankFailedError, match="the disk is full"):
        resync(calls, [OLD]).sync_weights(5, calls.update_weights)


def test_while_training_has_nothing_to_do_only_the_new_server_is_updated():
    calls = Calls(standing=[EngineGroupStatus([NEW], 1)], begin_weight_update=[[NEW]])
    with resync(calls, [OLD, OTHER]).trainer_idle(4, pytest.fail):
        pass
    assert calls.made == [
        ("standing",),
        ("begin_weight_update", True),
        ("connect", [NEW.url]),
        ("update", 4),
        ("end_weight_update", [NEW.url], "4"),
    ]


def test_a_server_that_is_lost_again_before_it_gets_weights_is_updated_nothing():
    calls = Calls(standing=[EngineGroupStatus([NEW], 1)], begin_weight_update=[[]])
    with resync(calls, [OLD]).trainer_idle(4, pytest.fail):
        pass
    assert calls.made == [("standing",), ("begin_weight_update", True)]


@pytest.mark.parametrize(("serving", "rescued"), [(1, 0), (0, 1)])
def test_with_other_weights_or_asleep_training_is_woken_up_only_for_the_last_server(serving, rescued):
    calls, rescues = Calls(standing=[EngineGroupStatus([NEW], serving)]), []
    with resync(calls, [OLD]).trainer_idle(None, lambda: rescues.append(1)):
        pass
    assert len(rescues) == rescued
    assert calls.made == [("standing",)]


class CallsWithNews(Calls):
    """Heeds news in every wait as the supervisor does: before the answer, and not while it is acting."""

    def __init__(self, monkeypatch, arriving: dict[str, int], **answers: list) -> None:
        """`arriving` has the method in whose first wait something happens, and the number of events."""
        super().__init__(**answers)
        self.attendant: EngineResync | None = None
        self.arriving = arriving
        monkeypatch.setattr(joining_module.ray, "get", lambda _: RecoveryEvents(self.heard, [f"event {self.heard}"]))
        self.heard = 0

    def get(self, refs, awaited):
        answer = super().get(refs, awaited)
        if self.attendant is not None and (count := self.arriving.pop(refs[0][0], 0)):
            self.heard += count
            attendant, self.attendant = self.attendant, None
            attendant.news()
            attendant.act()
            self.attendant = attendant
        return answer


@pytest.mark.parametrize("wait", ["standing", "begin_weight_update", "end_weight_update"])
def test_what_happens_during_a_weight_update_is_acted_upon_after_it_and_no_server_is_updated_twice(monkeypatch, wait):
    standings = [EngineGroupStatus([NEW], 1), EngineGroupStatus([OTHER], 2)]
    calls = CallsWithNews(monkeypatch, {wait: 1}, standing=standings, begin_weight_update=[[NEW], [OTHER]])
    calls.attendant = made = resync(calls, [OLD])
    with made.trainer_idle(4, pytest.fail):
        pass
    assert calls.weight_updates() == [("connect", [NEW.url]), ("update", 4), ("connect", [OTHER.url]), ("update", 4)]
    assert [call for call in calls.made if call[0].endswith("_weight_update")] == [
        ("begin_weight_update", True),
        ("end_weight_update", [NEW.url], "4"),
        ("begin_weight_update", True),
        ("end_weight_update", [OTHER.url], "4"),
    ]


def test_the_last_servers_are_rescued_once_though_another_is_lost_meanwhile(monkeypatch):
    calls = CallsWithNews(
        monkeypatch, {"standing": 2}, standing=[EngineGroupStatus([NEW], 0), EngineGroupStatus([], 1)]
    )
    calls.attendant, rescues = resync(calls, [OLD]), []
    with calls.attendant.trainer_idle(None, lambda: rescues.append(1)):
        pass
    assert len(rescues) == 1


def test_another_server_at_an_address_that_was_connected_is_connected_anew():
    calls = Calls(begin_weight_update=[[OLD], [dataclasses.replace(OLD, life=1)]])
    made = resync(calls, [OLD])
    made.sync_weights(5, calls.update_weights)
    made.sync_weights(6, calls.update_weights)
    assert calls.weight_updates() == [("update", 5), ("connect", [OLD.url]), ("update", 6)]
