"""Settings of the servers of --rm-model: a reward model gives embeddings, a teacher is a language model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine import ServerSettings
from slimrl.cluster.engines.reward_server import RewardServers, server_settings


def settings_of(**flags: Any) -> ServerSettings:
    args = Arguments(rm_model="/models/32B", rm_num_gpus_per_engine=4, rollout_seed=42, **flags)
    launch = SimpleNamespace(machine=SimpleNamespace(cuda=True), bind="10.0.0.1")
    return server_settings(args, Path("/models/32B"), 1, cast("Any", launch))


@pytest.mark.parametrize(
    ("flags", "role", "more"),
    [
        ({"rm_type": "reward_model"}, "_reward", {"is_embedding": True}),
        ({"use_opd": True, "opd_type": "sglang"}, "_teacher", {}),
    ],
)
def test_role_decides_what_a_server_computes(flags: dict[str, Any], role: str, more: dict[str, Any]):
    options = {"api_key": "key", "mem_fraction_static": 0.8, "pp_size": 2}
    found = settings_of(rm_server_options=options, **flags)
    assert found.role == role and found.options == options | more
    assert (found.model_path, found.tensor_parallel_size, found.random_seed) == ("/models/32B", 2, 43)
    assert found.key == "key" and not found.memory_saver


def test_addresses_of_started_servers_become_the_address_of_the_model():
    engines = cast("Any", [SimpleNamespace(url="http://10.0.0.1:1"), SimpleNamespace(url="http://10.0.0.2:2")])
    args = Arguments(rm_model="/models/32B", use_opd=True, opd_type="sglang")
    assert RewardServers(engines, "teacher").reachable(args).rm_url == "http://10.0.0.1:1,http://10.0.0.2:2"
    assert RewardServers([]).reachable(args) is args
