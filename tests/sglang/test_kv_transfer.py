"""The options and environment of prefill and decode servers, and what is said where their caches cannot be moved."""

import pytest

from slimrl.engines.protocol import EngineUnsupportedError
from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.sglang import kv_transfer
from slimrl.engines.sglang.kv_transfer import check_installed, role_environment, role_options
from slimrl.engines.sglang.router import router_command, router_options
from slimrl.engines.sglang.server import server_command, server_flags


def test_each_role_has_the_options_that_its_server_needs():
    assert role_options("regular", 9000, cuda=False) == {}
    prefill = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9000}
    assert role_options("prefill", 9000, cuda=False) == role_options("prefill", 9000, cuda=True) == prefill
    assert role_options("decode", 9000, cuda=True) == {"disaggregation_mode": "decode"}
    on_cpu = role_options("decode", 9000, cuda=False)
    assert on_cpu == {"disaggregation_mode": "decode", "disaggregation_decode_retraction_backup": "cpu_tensor"}
    assert on_cpu.keys() <= {flag.dest for flag in server_flags().values()}  # of the installed SGLang


def test_caches_move_over_tcp_at_the_servers_address_unless_the_user_says_otherwise():
    assert role_environment("regular", "10.0.0.1", {}, cuda=False) == {}
    address = {"SGLANG_HOST_IP": "10.0.0.1"}
    assert role_environment("decode", "10.0.0.1", {}, cuda=True) == address
    assert role_environment("prefill", "10.0.0.1", {}, cuda=False) == address | {"MC_FORCE_TCP": "1"}
    given = {"MC_FORCE_TCP": "0", "HOST_IP": "10.1.0.1"}
    assert role_environment("prefill", "10.0.0.1", given, cuda=False) == {}


def test_role_is_set_by_the_flag_of_the_run_only():
    with pytest.raises(ValueError, match="--sglang-disaggregation-mode is set by slimrl itself"):
        server_command({}, {"disaggregation_mode": "decode"}, ServerLaunch(cuda=False))


def test_router_of_prefill_and_decode_servers_sends_every_request_to_both():
    given = router_options({}, request_timeout_s=60, conversations=True, disaggregated=True)
    assert given == {"request_timeout_secs": 60, "pd_disaggregation": True, "disable_circuit_breaker": True}
    assert "--pd-disaggregation" in router_command("127.0.0.1", 1, 2, given)


def test_missing_backend_is_named_with_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(kv_transfer.MODULES, "nixl", "no_such_module")
    check_installed("fake", cuda=True)  # has no package
    assert "fake, whose ports listen on all addresses of a machine and need no key" in caplog.text
    with pytest.raises(EngineUnsupportedError, match=r"`import no_such_module` fails \(ModuleNotFoundError: .*install"):
        check_installed("nixl", cuda=True)


def test_mooncake_for_weights_is_named_with_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(kv_transfer.MODULES, "mooncake", "mooncake_is_not_here")
    with pytest.raises(EngineUnsupportedError, match=r"--update-weight-transport mooncake needs Mooncake, and `import"):
        kv_transfer.check_mooncake()
    assert caplog.messages == []
    monkeypatch.setitem(kv_transfer.MODULES, "mooncake", "json")
    kv_transfer.check_mooncake()
    assert "whose ports listen on all addresses of a machine and need no key" in caplog.text


def test_backend_for_gpus_is_refused_without_one():
    with pytest.raises(EngineUnsupportedError, match="nixl moves KV caches between GPUs, and there is none: leave it"):
        check_installed("nixl", cuda=False)
