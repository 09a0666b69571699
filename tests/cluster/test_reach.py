"""The address that a run binds: loopback on one machine, else the node's own."""

import socket

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.launch import LOOPBACK, BindConfig, is_this_machine, partner_of, server_host, source_address
from slimrl.engines.protocol import EngineError


def test_single_node_run_binds_loopback_and_multi_node_run_the_node_address():
    assert BindConfig(nodes=1).address("10.0.0.7") == LOOPBACK
    assert BindConfig(nodes=2).address("10.0.0.7") == "10.0.0.7"


def test_remote_external_server_must_be_able_to_reach_the_run():
    assert partner_of(Arguments()) is None
    assert partner_of(Arguments(rollout_external_engine_addrs=["127.0.0.1:30000", "localhost:30001"])) is None
    assert partner_of(Arguments(rollout_external_engine_addrs=["127.0.0.1:1", "192.0.2.250:30000"])) == "192.0.2.250"
    assert partner_of(Arguments(sglang_router_ip="192.0.2.250", sglang_router_port=1)) == "192.0.2.250"
    away = BindConfig(nodes=1, partner="192.0.2.250")
    assert not away.one_machine
    assert away.address("10.0.0.7") == "10.0.0.7"


def test_run_binds_an_address_its_peer_can_reach_when_ray_is_on_loopback(monkeypatch):
    monkeypatch.setattr("slimrl.cluster.launch.source_address", lambda host: f"as seen by {host}")
    assert BindConfig(nodes=1, partner="192.0.2.250").address("127.0.0.1") == "as seen by 192.0.2.250"
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_local_machine_is_recognized_by_all_its_names():
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("localhost")
    assert is_this_machine(socket.gethostname())
    assert not is_this_machine("no-such-host.invalid")


def test_host_flag_of_the_user_is_used():
    assert server_host(None, "10.0.0.7") == "10.0.0.7"
    assert server_host("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert server_host("10.1.1.1", "127.0.0.1", ["a", "a"]) == "10.1.1.1"
    with pytest.raises(EngineError, match=r"--sglang-host 10.1.1.1 is on one node, and the servers are on 2: leave it"):
        server_host("10.1.1.1", "127.0.0.1", ["a", "b"])


def test_gloo_and_nccl_use_the_interface_the_run_binds():
    inherited = {"NCCL_SOCKET_IFNAME": "eth7"}
    assert BindConfig(nodes=1).environment("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert BindConfig(nodes=1).environment("10.0.0.7", inherited) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert BindConfig(nodes=2).environment("127.0.0.1", {}) == {}


def test_unreachable_peer_is_named():
    with pytest.raises(EngineError, match=r"no-such-host.invalid \(--sglang-router-ip or --rollout-external-engine-a"):
        source_address("no-such-host.invalid")
