"""Prefill and decode on different servers: KV caches move from one to the other over TCP (Mooncake)."""

import re
import signal

import pytest

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import faults, harness
from tests.mooncake import mooncake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SPLIT = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 2, "num_rollout": 3, "check_weight_update_equal": True}
ROLES = {"prefill_num_servers": 1}
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
TWO_SIZES = """sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: decode, num_gpus: 2, num_gpus_per_engine: 1}
"""


@pytest.fixture(scope="module")
def transfer(tmp_path_factory):
    return mooncake(tmp_path_factory)


def start(tiny, folder, transfer, entry="train.py", **changes):
    folder.mkdir(exist_ok=True)
    dumps = {"save_debug_rollout_data": folder / "dumps" / "{rollout_id}.jsonl"}
    flags = tiny.flags(**{**SPLIT, **dumps, **changes})
    return harness.start(entry, flags, folder, "roles", tiny.home, environment=transfer)


def finish(started):
    done = started.finish(300)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


def assert_on_policy(done):
    """Both servers had the weights of every step."""
    assert done.steps("weight_version") == [str(version) for version in range(len(done.summary["steps"]))]
    assert max(done.steps("train_rollout_logprob_abs_diff_mean")) < 1e-5


def rollouts(folder, count):
    return [read_dump(folder / "dumps" / f"{rollout}.jsonl").samples for rollout in range(count)]


def requests(done, server):
    """The generation requests that a server has answered."""
    return (done.run_dir / "logs" / f"sglang{server}.log").read_text().count('"POST /generate HTTP/1.1" 200')


def test_prefill_and_decode_servers_sample_the_tokens_of_whole_servers_over_weight_updates(tiny, tmp_path, transfer):
    finish(start(tiny, tmp_path / "whole", transfer))
    done = finish(start(tiny, tmp_path / "roles", transfer, **ROLES))
    assert_on_policy(done)
    whole, roles = (rollouts(tmp_path / name, 3) for name in ("whole", "roles"))
    assert [len(samples) for samples in roles] == [32] * 3
    for first, second in zip(whole, roles, strict=True):
        for one, other in zip(first, second, strict=True):
            assert one.tokens == other.tokens
            assert one.rollout_log_probs == pytest.approx(other.rollout_log_probs, abs=1e-5)
    # every request went to both servers
    assert requests(done, 0) == requests(done, 1) >= 3 * 32


def test_caches_move_between_servers_of_two_sizes_whose_memory_is_released_for_training(tiny, tmp_path, transfer):
    (tmp_path / "groups.yaml").write_text(TWO_SIZES)
    colocated = {"colocate": True, "actor_num_gpus_per_node": 4, "rollout_num_gpus": None}
    assert_on_policy(finish(start(tiny, tmp_path, transfer, sglang_config=tmp_path / "groups.yaml", **colocated)))


def test_requests_that_are_aborted_between_the_servers_are_generated_again(tiny, tmp_path, transfer):
    aborted = {"partial_rollout": True, "over_sampling_batch_size": 20, "rollout_max_response_len": 64}
    aborted |= {"dynamic_sampling_filter_path": FILTER, "num_rollout": 6, "mask_offpolicy_in_partial_rollout": True}
    done = finish(start(tiny, tmp_path, transfer, **ROLES, **aborted))
    assert max(done.steps("train_rollout_logprob_abs_diff_mean")) < 1e-5  # of the tokens of the step's weights
    assert [len(samples) for samples in rollouts(tmp_path, 6)] == [32] * 6
    assert "Aborted by AbortReq" in (done.run_dir / "logs" / "sglang0.log").read_text()


def test_fully_asynchronous_run_drains_both_servers_before_an_update(tiny, tmp_path, transfer):
    asynchronous = {"max_weight_staleness": 2, "no_update_weights_in_flight": True, "rollout_max_response_len": 200}
    done = finish(start(tiny, tmp_path, transfer, "train_async.py", **ROLES, **asynchronous))
    assert max(done.steps("rollout/staleness/max")) <= 2
    # no response is of two versions
    assert all(len(set(sample.weight_versions)) == 1 for samples in rollouts(tmp_path, 3) for sample in samples)


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_lost_server_of_a_role_is_replaced_and_its_requests_are_sent_again(tiny, tmp_path, transfer, lost):
    health = {"rollout_health_check_interval": 0.5, "rollout_health_check_timeout": 10}
    started = start(tiny, tmp_path, transfer, **ROLES, **health, use_fault_tolerance=True, num_rollout=8)
    started.wait_for_line("step 1 |", 200)
    (server,) = (one for one in faults.victims(started, "server") if f"--disaggregation-mode={lost}" in one.cmdline())
    server.send_signal(signal.SIGKILL)
    done = finish(started)
    assert_on_policy(done)
    number = ["prefill", "decode"].index(lost)
    assert f"SGLang server {number} (" in done.output and " died with exit code -9" in done.output
    assert re.search(rf"SGLang server {number}\.1 \(\S+\) has weights \d and serves", done.output)
