"""Training and generation on separate GPUs: broadcast weights, and one-step off-policy."""

import json
import shutil
from pathlib import Path

import pytest

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import harness, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SLIME_STYLE = Path(__file__).parents[1] / "compatibility/slime_style"
SPLIT = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "tensor_model_parallel_size": 2}


def finish(entry, tiny, folder, **changes):
    flags = tiny.flags(**{**SPLIT, "check_weight_update_equal": True, "num_rollout": 4, **changes})
    done = harness.start(entry, flags, folder, "split", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


def assert_on_policy(steps):
    for step in steps:
        assert step["train_rollout_logprob_abs_diff_mean"] < 1e-5
        assert step["train_rollout_logprob_abs_diff_max"] < 1e-3


def test_split_run_is_on_policy_and_metrics_reach_every_writer(tiny, tmp_path):
    port = metrics.free_port()
    evaluation = {"eval_interval": 2, "eval_prompt_data": ["addition", f"{tiny.folder / 'eval.jsonl'}@[0:4]"]}
    # with the pass, the ratio of the first step compares two forward passes
    checks = {"check_weight_update_equal": True, "compute_old_log_probs": "always"}
    changes = {**SPLIT, **checks, "num_rollout": 4, **evaluation, **metrics.flags(port)}
    run = harness.start("train.py", tiny.flags(**changes), tmp_path, "split", tiny.home)
    run.wait_for_line("step 1 |", 200)  # two steps before its end, after which nothing answers
    scraped, shown = metrics.scrape(port), run.processes(metrics.KEY)
    targets = metrics.targets(run.run_dir)
    done = run.finish(200)
    assert (done.code, done.left) == (0, []), done.output[-6000:]
    assert shown == [] and metrics.KEY not in done.output
    assert targets["sglang"].count("sglang:prompt_tokens") == 2 and "slimrl_rollout_raw_reward" in targets["slimrl"]
    assert any(name.startswith("smg_") for name in targets["router"])
    metrics.assert_all_agree(done.run_dir, done.summary)
    step = metrics.in_charts(done.summary["steps"][int(scraped["rollout/step"])])
    assert {name: value for name, value in scraped.items() if name in step and name != "perf/evaluate_time"} == {
        name: value for name, value in step.items() if name != "perf/evaluate_time"
    }
    assert done.steps("weight_version") == ["0", "1", "2", "3"]
    assert_on_policy(done.summary["steps"])
    first = done.summary["steps"][0]
    assert first["ratio_max_abs_diff"] < 1e-5 and abs(first["kl_loss"]) < 1e-5


def test_one_step_off_policy_samples_are_at_most_one_version_stale(tiny, tmp_path):
    evaluation = {"eval_interval": 2, "eval_prompt_data": ["addition", f"{tiny.folder / 'eval.jsonl'}@[0:8]"]}
    done = finish("train_async.py", tiny, tmp_path, **evaluation)
    assert done.steps("weight_version") == ["0", "0", "1", "2"]
    assert_on_policy(done.summary["steps"][:1])
    # one version apart the log-probabilities differ: the test above would detect a weight update that is too early
    # or late
    assert all(step["train_rollout_logprob_abs_diff_max"] > 1e-3 for step in done.summary["steps"][1:])
    assert [entry["step"] for entry in done.summary["eval"]["history"]] == [0, 2, 4]


def test_weights_are_updated_every_second_rollout_of_one_epoch_and_saved_at_the_end(tiny, tmp_path):
    # 40 prompts in rollouts of 8 are 5 rollouts
    changes = {"num_rollout": None, "num_epoch": 1, "prompt_data": f"{tiny.folder / 'train.jsonl'}@[0:40]"}
    folder = tmp_path / "checkpoints"
    changes |= functions_written_for_slime(tmp_path)
    done = finish("train_async.py", tiny, tmp_path, update_weights_interval=2, save=folder, **changes)
    assert done.steps("step") == [0, 1, 2, 3, 4]
    # rollout n + 1 starts before rollout n is trained; weight updates follow rollouts 1 and 3
    assert done.steps("weight_version") == ["0", "0", "0", "2", "2"]
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    assert_functions_written_for_slime_took_part(done, tmp_path)


def functions_written_for_slime(folder):
    """Writes an agent, its reward and a loss correction that import slime into the folder of the run."""
    for module in SLIME_STYLE.glob("*.py"):
        shutil.copy(module, folder)
    own = {"most_calls_that_count": 1, "bound_low": 0.5, "bound_high": 2.0}
    (folder / "own.yaml").write_text(json.dumps({"custom": own}))
    return {
        "custom_config_path": folder / "own.yaml",
        "custom_generate_function_path": "tool_agent.generate",
        "custom_rm_path": "tool_agent.reward_func",
        "use_tis": True,
        "custom_tis_function_path": "mismatch.bounded_weights",
        "save_debug_rollout_data": folder / "dumps/{rollout_id}.jsonl",
    }


def assert_functions_written_for_slime_took_part(done, folder):
    first, *later = done.summary["steps"]
    # of the exact weights and tokens: the agent returned what the servers sampled
    assert first["train_rollout_logprob_abs_diff_max"] < 1e-3 and first["mis_ratio"] == pytest.approx(1.0, abs=1e-4)
    # the remaining mismatch after the correction, of weights up to three updates old
    assert all(0 < step["mis_ratio"] <= 2 and abs(step["mis_ratio"] - 1) > 1e-4 for step in later[1:])
    samples = read_dump(folder / "dumps/0.jsonl").samples
    assert {sample.weight_versions[0] for sample in samples} == {"0"}
    called = [sample for sample in samples if 0 in sample.loss_mask]
    assert len(called) > 8 and {round(sample.reward, 1) for sample in called} <= {-0.9, 1.1}
    for sample in called:
        said = [value for value, trained in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not trained]
        assert set(said) == {0.0} and ")" in sample.response
