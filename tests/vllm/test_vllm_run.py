"""A whole run with vLLM servers, one of which is killed; needs SLIMRL_VLLM_PYTHON, as `test_vllm_server`."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end import faults, harness
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


def test_run_with_vllm_replaces_a_killed_server_and_trains_on_every_sample_once(tiny, tmp_path):
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
