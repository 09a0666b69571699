"""A whole run with vLLM servers, one of which is killed, and its export in a vLLM server; needs SLIMRL_VLLM_PYTHON."""

from __future__ import annotations

import os
import signal

import pytest

from slimrl.engines.backend import VLLM, backend
from slimrl.engines.server_protocol import ServerLaunch
from tests.end_to_end import faults, harness, serving
from tests.end_to_end.conftest import Tiny, run_tool

PYTHON = os.environ.get("SLIMRL_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="SLIMRL_VLLM_PYTHON names no interpreter of an environment with vllm"),
]
STEPS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    """A random tiny model with heads that vLLM's attention on a CPU has."""
    folder = tmp_path_factory.mktemp("vllm_run")
    made = Tiny(folder / "additions", folder / "home", folder / "torch_dist")
    made.home.mkdir()
    sizes = ("--kv-channels", "32", "--warm-start-steps", "0", "--train-size", "64", "--eval-size", "8")
    done = run_tool("make_tiny_model.py", "--output-dir", made.folder, *sizes)
    assert done.returncode == 0, done.stderr
    flags = (*made.model_args(), "--hf-checkpoint", made.model, "--save", made.torch_dist)
    done = run_tool("convert_hf_to_torch_dist.py", *flags)
    assert done.returncode == 0, done.stderr
    return made


def test_run_replaces_a_killed_server_trains_on_every_sample_once_and_its_export_chats_in_vllm(tiny, tmp_path):
    dumps = tmp_path / "dumps" / "{rollout_id}.jsonl"
    flags = tiny.flags(
        rollout_engine="vllm",
        vllm_python=PYTHON,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=2,
        num_rollout=STEPS,
        sglang_disable_radix_cache=None,
        sglang_enable_deterministic_inference=None,
        check_weight_update_equal=None,
        use_fault_tolerance=True,
        rollout_health_check_interval=2,
        rollout_health_check_timeout=60,
        save_debug_rollout_data=dumps,
        save=tmp_path / "checkpoints",
        save_interval=STEPS,
        save_hf=tmp_path / "hf_{rollout_id}",
    )
    started = harness.start("train.py", flags, tmp_path, "vllm", tiny.home)
    started.wait_for_line("step 1 |", 300)
    servers = [one for one in started.processes("slimrl_vllm_server.py") if one.cmdline()[0] == PYTHON]
    servers[0].send_signal(signal.SIGKILL)
    done = started.finish(400)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    for step, samples in enumerate(faults.rollouts(dumps, STEPS)):
        assert len(samples) == 32
        assert {version for sample in samples for version in sample.weight_versions} == {str(step)}
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-5
    assert sum(done.steps("rollout/faults/servers_lost")) == 1
    assert "vLLM server" in done.output
    assert_chats(tmp_path / f"hf_{STEPS - 1}", tmp_path)


def assert_chats(model, folder):
    """Asserts that OpenAI's call to a vLLM server gives the greedy answers of transformers, thinking or not."""
    options, launch = {"python": PYTHON}, ServerLaunch(cuda=False)
    server = backend(VLLM).server(model, log_path=folder / "served.log", options=options, launch=launch, key="a key")
    try:
        server.start()
        server.wait_ready(250)
        for thinking in (True, False):
            answer = serving.chat(server.url, "1+1=", model=str(model), key="a key", enable_thinking=thinking)
            assert answer.strip() == serving.greedy(model, "1+1=", enable_thinking=thinking).strip()
    finally:
        server.stop()
