"""Training and generation on the same slots: on-policy truth, determinism, resume after SIGKILL, a clean end."""

import signal

import pytest

from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
STEPS = 4


def colocated(tiny, folder, **changes):
    return tiny.flags(
        colocate=True,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        num_rollout=STEPS,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=2,
        eval_interval=STEPS,
        eval_prompt_data=["addition", f"{tiny.folder / 'eval.jsonl'}@[0:32]"],
        eval_temperature=0,
        check_weight_update_equal=True,
        **changes,
    )


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A run of STEPS rollouts, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    before = harness.shared_memory()
    done = harness.start("train.py", colocated(tiny, folder), folder, "whole", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    done.left = harness.wait_until_gone(done.mark)
    done.shared_memory = harness.shared_memory() - before
    return done


@pytest.fixture(scope="module")
def resumed(tiny, tmp_path_factory):
    """The same run, killed without warning after half of its rollouts and started again."""
    folder = tmp_path_factory.mktemp("resumed")
    first = harness.start("train.py", colocated(tiny, folder), folder, "resumed", tiny.home)
    first.wait_for_line("step 2 |", 150)
    first.kill_everything()
    done = harness.start("train.py", colocated(tiny, folder), folder, "resumed", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    return done


def test_every_step_is_on_policy(whole):
    steps = whole.summary["steps"]
    assert [step["step"] for step in steps] == list(range(STEPS))
    for step in steps:
        assert step["train_rollout_logprob_abs_diff_mean"] < 1e-5
        assert step["train_rollout_logprob_abs_diff_max"] < 1e-3


def test_each_rollout_is_generated_by_the_weights_just_pushed(whole):
    assert [step["weight_version"] for step in whole.summary["steps"]] == [str(i) for i in range(STEPS)]


def test_the_first_step_has_ratio_one_and_no_distance_to_the_reference(whole):
    first = whole.summary["steps"][0]
    assert first["ratio_max_abs_diff"] < 1e-5
    assert abs(first["kl_loss"]) < 1e-5


def test_training_moves_away_from_the_reference(whole):
    assert whole.summary["steps"][-1]["kl_loss"] > 1e-6


def test_evaluation_runs_before_and_after(whole):
    evaluation = whole.summary["eval"]
    for when in ("before", "after"):
        assert evaluation[when] * 32 == pytest.approx(round(evaluation[when] * 32))


def test_nothing_is_left_behind(whole):
    assert whole.left == []
    assert whole.shared_memory == set()


def test_a_second_run_with_the_same_flags_prints_the_same_numbers(whole, resumed):
    for ours, theirs in zip(whole.summary["steps"][:2], resumed.summary["steps"][:2], strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == theirs["grad_norm"]


def test_a_run_killed_half_way_resumes_bit_for_bit(whole, resumed):
    ours, theirs = whole.summary["steps"], resumed.summary["steps"]
    assert [step["step"] for step in theirs] == list(range(STEPS))
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        assert one["reward"] == other["reward"]
        assert one["loss"] == other["loss"]
    for name in ("latest_checkpointed_iteration.txt",):
        assert (whole.run_dir.parents[1] / "checkpoints" / name).read_text() == (
            resumed.run_dir.parents[1] / "checkpoints" / name
        ).read_text()


def test_interrupting_ends_everything(tiny, tmp_path):
    before = harness.shared_memory()
    flags = colocated(tiny, tmp_path)
    flags[flags.index("--num-rollout") + 1] = "500"
    started = harness.start("train.py", flags, tmp_path, "interrupted", tiny.home)
    started.wait_for_line("step 1 |", 150)
    started.process.send_signal(signal.SIGINT)
    done = started.finish(60)
    assert done.code == 130
    assert harness.wait_until_gone(done.mark) == []
    assert harness.shared_memory() - before == set()
