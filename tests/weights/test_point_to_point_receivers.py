"""An engine rank's end of a point-to-point update, called as its server calls it: its links, and how it fails."""

from __future__ import annotations

import base64
import datetime
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import FileStore, TCPStore

from slimrl.engines.sglang import weight_loaders
from slimrl.weights.point_to_point.engine_side import Call, serialize_call
from slimrl.weights.point_to_point.links import Buffers, LinkError, ProcessGroupLink, Readiness, failure_key
from slimrl.weights.update.transport_distributed import listening_store

HOST = "127.0.0.1"


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield listening_store(HOST, datetime.timedelta(seconds=20))


@pytest.fixture
def call(store: TCPStore) -> Callable[..., dict[str, Any]]:
    """Calls a rank that is the only member of its link; returns its answer."""

    def made(model: nn.Module, action: Any, name: str) -> dict[str, Any]:
        key = f"answer {action} {name}"
        one = Call(action, name, key, (HOST, store.port), 20, members=1)
        names = {"targets": [], "columns": [], "dtypes": []} if action == "join" else None
        weight_loaders.receive_pieces(model, pickle.loads(base64.b64decode(serialize_call(one, names))))
        answer: dict[str, Any] = json.loads(store.get(key)) if action != "leave" else {}
        return answer

    return made


def links_of(model: nn.Module) -> list[str]:
    return list(getattr(model, weight_loaders.ATTRIBUTE))


def test_links_of_lost_trainers_are_closed_by_the_next_description(call):
    model = nn.Linear(2, 3)
    for name in ("first", "second", "third"):  # none of them leaves
        assert call(model, "describe", name)["shapes"] == {"weight": [3, 2], "bias": [3]}
        assert call(model, "join", name) == {}
        assert links_of(model) == [name]
    call(model, "leave", "third")
    assert links_of(model) == []


def test_failure_before_an_engine_rank_receives_ends_the_wait_of_the_senders_at_once(call, store):
    """The server has restarted: it answers, and its HTTP call succeeds."""
    assert "the server has restarted" in call(nn.Linear(2, 3), "receive", "lost")["error"]
    assert store.check([failure_key("lost")])
    waiting = Readiness(store, "lost", [5], lambda: None, timeout_s=600)
    with pytest.raises(LinkError, match="another rank has failed"):
        waiting.wait(0)


def test_calls_for_gpus_have_the_arguments_that_torch_takes(tmp_path):
    """gloo, which has no such calls, refuses them by name; a wrong argument would be a TypeError."""
    host = torch.device("cpu")
    link = ProcessGroupLink(FileStore(str(tmp_path / "store"), 1), 0, 1, Buffers({}, {}, host), host, timeout_s=20)
    with pytest.raises(RuntimeError, match="startCoalescing"):
        link._together([(0, torch.zeros(1), True)])
    link.close(failed=False)
