"""On which address a run listens: loopback on one machine, else the node's own."""

import socket

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.network import LOOPBACK, Reach, called_at, is_here, partner_of, source_address
from slimrl.engines.protocol import EngineError


def test_a_run_on_one_machine_listens_on_loopback_and_one_on_several_on_the_nodes_address():
    assert Reach(nodes=1).address("10.0.0.7") == LOOPBACK
    assert Reach(nodes=2).address("10.0.0.7") == "10.0.0.7"


def test_a_server_of_the_users_on_another_machine_must_reach_the_run():
    assert partner_of(Arguments()) is None
    assert partner_of(Arguments(rollout_external_engine_addrs=["127.0.0.1:30000", "localhost:30001"])) is None
    assert partner_of(Arguments(rollout_external_engine_addrs=["127.0.0.1:1", "192.0.2.250:30000"])) == "192.0.2.250"
    assert partner_of(Arguments(sglang_router_ip="192.0.2.250", sglang_router_port=1)) == "192.0.2.250"
    away = Reach(nodes=1, partner="192.0.2.250")
    assert not away.one_machine
    assert away.address("10.0.0.7") == "10.0.0.7"


def test_where_ray_is_on_loopback_the_run_listens_where_its_partner_sees_it(monkeypatch):
    monkeypatch.setattr("slimrl.cluster.network.source_address", lambda host: f"as seen by {host}")
    assert Reach(nodes=1, partner="192.0.2.250").address("127.0.0.1") == "as seen by 192.0.2.250"
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_this_machine_is_known_by_all_its_names():
    assert is_here("127.0.0.1")
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert not is_here("no-such-host.invalid")


def test_the_users_host_is_respected():
    assert called_at(None, "10.0.0.7") == "10.0.0.7"
    assert called_at("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert called_at("10.1.1.1", "127.0.0.1", ["a", "a"]) == "10.1.1.1"
    with pytest.raises(EngineError, match=r"--sglang-host 10.1.1.1 is on one node, and the servers are on 2: leave it"):
        called_at("10.1.1.1", "127.0.0.1", ["a", "b"])


def test_gloo_and_nccl_use_the_interface_on_which_a_run_listens():
    inherited = {"NCCL_SOCKET_IFNAME": "eth7"}
    assert Reach(nodes=1).environment("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert Reach(nodes=1).environment("10.0.0.7", inherited) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert Reach(nodes=2).environment("127.0.0.1", {}) == {}


def test_a_partner_to_which_no_way_leads_is_named():
    with pytest.raises(EngineError, match=r"no-such-host.invalid \(--sglang-router-ip or --rollout-external-engine-a"):
        source_address("no-such-host.invalid")
