"""An external server and router serve a run: they are checked, receive weights and keep running afterwards."""

from __future__ import annotations

import json
import shutil

import pytest

from slimrl.engines.http import call
from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.external_server_check import inspect
from slimrl.engines.sglang.router import ExternalRouter, RouterProcess
from tests.end_to_end import harness
from tests.end_to_end.serving import served
from tests.megatron.launch import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def url(tiny, tmp_path_factory):
    with served(tiny.model, tmp_path_factory.mktemp("server"), "--enable-deterministic-inference") as url:
        yield url


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    router = RouterProcess(log_path=tmp_path_factory.mktemp("router") / "router.log")
    router.start()
    try:
        router.wait_alive(60)
        yield router
    finally:
        router.stop()


def test_external_server_receives_the_weights_and_is_never_stopped(url, router, tiny, tmp_path):
    flags = tiny.flags(
        actor_num_gpus_per_node=1,
        num_rollout=2,
        rollout_external_engine_addrs=url.removeprefix("http://"),
        sglang_router_ip=router.host,
        sglang_router_port=router.port,
        check_weight_update_equal=True,
        sglang_enable_deterministic_inference=None,
        sglang_disable_radix_cache=None,
    )
    done = harness.start("train.py", flags, tmp_path, "external", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1"]
    # a deterministic server answers all samples of a prompt alike unless they have their own seeds
    assert max(done.steps("rollout/zero_std/ratio")) < 1
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
    assert not [*(done.run_dir / "logs").glob("sglang*"), *(done.run_dir / "logs").glob("router*")]
    assert router.poll() is None and router.workers() == []
    assert ServerControl(url).weight_version() == "2"
    assert call("POST", f"{url}/generate", {"text": "1+1="}, timeout_s=30)["text"]


def test_router_with_other_servers_is_rejected(url, router):
    running = ExternalRouter(router.host, router.port)
    running.check()
    router.add_worker(url)
    try:
        router.wait_ready(1, 60)
        with pytest.raises(EngineError, match=f"already has the servers {url}, which are not of this run"):
            running.check()
        running.stop()
        assert [worker["url"] for worker in router.workers()] == [url]  # an external one
    finally:
        router.remove_worker(url)
    assert router.workers() == []
    with pytest.raises(EngineUnavailableError, match="cannot list its servers"):
        ExternalRouter("127.0.0.1", free_port()).check()


def test_external_server_is_checked_before_use(url, tiny, tmp_path):
    address = url.removeprefix("http://")
    assert inspect(address, str(tiny.model)).tensor_parallel_size == 1

    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7, "rms_norm_eps": 0.5}))
    with pytest.raises(EngineError) as caught:
        inspect(address, str(other))
    assert str(caught.value) == (
        f"--rollout-external-engine-addrs {address}: it serves {tiny.model}, whose config.json differs from that of"
        f" --hf-checkpoint {other} in num_hidden_layers, rms_norm_eps: serve the trained model"
    )

    unreachable = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineUnavailableError, match=f"{unreachable}: no server answers there: .* start it first"):
        inspect(unreachable, str(tiny.model))
