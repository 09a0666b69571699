"""Training and generation on the same GPUs: on-policy checks, determinism, resume, replay, export, clean shutdown."""

import json
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import attempts, checkpoints, harness, serving
from tests.observability.trace_format import read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
STEPS = 8
LAST = f"iter_{STEPS - 1:07d}"


def colocated(tiny, folder, **changes):
    flags = {
        "colocate": True,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 2,
        "num_rollout": STEPS,
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
        "save_interval": 3,
        "eval_interval": STEPS,
        "eval_prompt_data": ["addition", f"{tiny.folder / 'eval.jsonl'}@[0:32]"],
        "eval_temperature": 0,
        "check_weight_update_equal": True,
        "save_debug_rollout_data": folder / "dumps/{rollout_id}.jsonl",
        "save_debug_train_data": folder / "train_data/{rollout_id}.pt",
        "ci_test": True,
        "ci_train_rollout_logprob_abs_diff_threshold": 1e-5,
        "use_tensorboard": True,
    }
    return tiny.flags(**{**flags, **changes})


@pytest.fixture(scope="module")
def whole(tiny):
    """An uninterrupted run of STEPS rollouts; strangers attempt to access it while it runs."""
    folder = Path(tempfile.mkdtemp(prefix="slimrl-whole-"))  # pytest's own folders are private already
    run = harness.start("train.py", colocated(tiny, folder), folder, "whole", tiny.home)
    for opened in (folder, run.temporary):
        opened.chmod(0o755)
    run.wait_for_line("step 1", 150)
    run.process.send_signal(signal.SIGSTOP)  # or it ends before all attempts are made
    try:
        tried = attempts.try_everything(run, folder) if attempts.IS_ROOT else None
    finally:
        run.process.send_signal(signal.SIGCONT)
    done = run.finish(200)
    assert done.code == 0, done.output[-6000:]
    done.folder, done.attempts = folder, tried
    yield done
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def resumed(tiny, tmp_path_factory):
    """The same run, killed with SIGKILL in flight and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    first = harness.start("train.py", colocated(tiny, folder), folder, "resumed", tiny.home)
    first.wait_for_line("iter_0000002", 150)
    first.kill_everything()
    done = harness.start("train.py", colocated(tiny, folder), folder, "resumed", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    done.folder = folder
    return done


def replay(tiny, whole, folder, **changes):
    """Training on the rollouts that `whole` recorded, without engines."""
    dumps = whole.folder / "dumps/{rollout_id}.jsonl"
    without = {"save_debug_rollout_data": None, "check_weight_update_equal": None, "use_tensorboard": None}
    return colocated(tiny, folder, load_debug_rollout_data=dumps, **without, **changes)


# -- the run itself --------------------------------------------------------------------------------------------------


def test_every_step_is_on_policy(whole):
    assert whole.steps("step") == list(range(STEPS))
    assert max(whole.steps("train_rollout_logprob_abs_diff_mean")) < 1e-5
    assert max(whole.steps("train_rollout_logprob_abs_diff_max")) < 1e-3


def test_each_rollout_is_generated_by_the_latest_weights(whole):
    assert whole.steps("weight_version") == [str(step) for step in range(STEPS)]
    samples = read_dump(whole.folder / "dumps/3.jsonl").samples
    assert {version for sample in samples for version in sample.weight_versions} == {"3"}


def test_first_step_has_ratio_one_and_zero_kl_to_the_reference(whole):
    first = whole.summary["steps"][0]
    assert first["ratio_max_abs_diff"] < 1e-5
    assert abs(first["kl_loss"]) < 1e-5


def test_training_moves_away_from_the_reference(whole):
    assert whole.steps("kl_loss")[-1] > 1e-6


def test_engine_weights_were_compared_with_the_trained_ones(whole):
    assert whole.output.count("equal the trained ones, bit for bit") == 1


def test_trainer_and_engines_were_offloaded_in_turn_at_every_step(whole):
    for rank in range(2):
        assert whole.output.count(f"training rank {rank} is offloaded: weights ") == 1
    phases = ("release_engines", "wake_training", "park_training", "resume_engines")
    assert all(step["seconds"][phase] > 0 for step in whole.summary["steps"] for phase in phases)


def test_run_leaves_no_process_or_file(whole):
    assert whole.left == []


def test_rewards_match_the_recorded_samples(whole):
    for step, reward in enumerate(whole.steps("reward")):
        samples = read_dump(whole.folder / f"dumps/{step}.jsonl").samples
        right = [sample.response.startswith(f"\\boxed{{{sample.label}}}") for sample in samples]
        assert reward == pytest.approx(sum(right) / len(samples))


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_summary_is_complete(whole):
    summary = whole.summary
    assert summary["status"] == "completed"
    for when in ("before", "after"):
        assert summary["eval"][when] * 32 == pytest.approx(round(summary["eval"][when] * 32))
    for step in summary["steps"]:
        assert {"generate", "train", "update_weights", "total"} <= step["seconds"].keys()
        assert step["seconds"]["total"] >= step["seconds"]["train"] > 0
    assert {"torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers"} <= summary["versions"].keys()


def test_tensorboard_has_the_rewards_of_the_summary(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole.run_dir / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    assert {name.split("/")[0] for name in names} == {"rollout", "train", "eval", "perf", "memory"}
    points = events.Scalars("rollout/raw_reward")
    assert [point.step for point in points] == list(range(STEPS))
    assert [point.value for point in points] == pytest.approx(whole.steps("reward"))


def test_evaluations_are_recorded_like_rollouts(whole):
    for step, when in ((0, "before"), (STEPS, "after")):
        dump = read_dump(whole.folder / f"dumps/eval_{step}.jsonl")
        assert len(dump.samples) == 32
        assert sum(sample.reward for sample in dump.samples) / 32 == pytest.approx(whole.summary["eval"][when])


def test_generation_only_run_samples_what_the_run_sampled_before_training(tiny, whole, tmp_path):
    of_training = ("save", "load", "save_interval", "ref_load", "check_weight_update_equal", "save_debug_train_data")
    without = dict.fromkeys((*of_training, "ci_test", "ci_train_rollout_logprob_abs_diff_threshold"))
    changes = {**without, "debug_rollout_only": True, "num_rollout": 2, "colocate": None, "rollout_num_gpus": 1}
    done = harness.start("train.py", colocated(tiny, tmp_path, **changes), tmp_path, "sampled", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    for step in range(2):
        sampled, was = (read_dump(folder / f"dumps/{step}.jsonl").samples for folder in (tmp_path, whole.folder))
        assert [sample.prompt for sample in sampled] == [sample.prompt for sample in was]
        if step == 0:
            assert [sample.tokens for sample in sampled] == [sample.tokens for sample in was]
        else:  # by then the run had learned something
            assert [sample.rollout_log_probs for sample in sampled] != [sample.rollout_log_probs for sample in was]
    before, after = (done.summary["eval"][when] for when in ("before", "after"))
    assert before == after == whole.summary["eval"]["before"]
    assert not list((done.run_dir / "logs").glob("train-rank*"))


def evaluation_alone(entry, tiny, whole, folder, **changes):
    """Evaluates the dataset of `whole` without flags that only training needs."""
    training = ("save", "load", "save_interval", "check_weight_update_equal", "use_tensorboard", "ref_load")
    training += ("save_debug_train_data", "ci_test", "ci_train_rollout_logprob_abs_diff_threshold")
    training += ("prompt_data", "rollout_batch_size", "num_steps_per_rollout", "rollout_max_response_len")
    without = {**dict.fromkeys(training), "colocate": None, "num_rollout": 0, "eval_max_response_len": 16}
    done = harness.start(entry, colocated(tiny, folder, **{**without, **changes}), folder, "alone", tiny.home)
    done = done.finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.summary["status"] == "completed" and done.summary["steps"] == []
    assert len(done.summary["eval"]["history"]) == 1
    return done


def test_checkpoint_can_be_evaluated_alone(tiny, whole, tmp_path):
    checkpoint = whole.folder / "checkpoints"
    before = sorted(checkpoint.iterdir())
    done = evaluation_alone("train_async.py", tiny, whole, tmp_path, load=checkpoint, rollout_num_gpus=1)
    assert done.summary["eval"]["before"] == whole.summary["eval"]["after"]
    assert (
        read_dump(tmp_path / f"dumps/eval_{STEPS}.jsonl").header["metrics"]["eval/addition-pass@1"]
        == (whole.summary["eval"]["after"])
    )
    assert sorted(checkpoint.iterdir()) == before


def test_model_is_evaluated_without_a_training_process(tiny, whole, tmp_path):
    done = evaluation_alone("train.py", tiny, whole, tmp_path, debug_rollout_only=True, rollout_num_gpus=1)
    assert done.summary["eval"]["before"] == whole.summary["eval"]["before"]
    assert not list((done.run_dir / "logs").glob("train-rank*"))


@pytest.fixture(scope="module")
def timeline(whole):
    return read_trace(whole.run_dir / "timeline.json.gz")


def test_every_process_has_a_track_in_the_timeline(timeline):
    driver, manager, *ranks = [name for name in timeline.processes if not name.startswith("server ")]
    assert (driver, manager, ranks) == ("driver", "rollout manager", ["train rank 0", "train rank 1"])
    servers = [name for name in timeline.processes if name.startswith("server ")]
    for server in servers:  # one weight update before training and one after each rollout
        assert len(timeline.of(server, "commit_weight_update")) == STEPS + 1
    assert len(servers) == 2
    for rank in ranks:
        assert [span.facts["about"] for span in timeline.of(rank, "train")] == list(range(STEPS))
        assert len(timeline.of(rank, "optimizer step")) == STEPS
    for process in ("driver", *ranks, *(f"server{number}" for number in range(2))):
        name = f"{process.replace('train rank ', 'rank')}_rss_gib"
        assert len(timeline.counters["driver", name]) >= STEPS


def test_timeline_phases_match_the_durations_of_the_summary(whole, timeline):
    turns = [span for span in timeline.of("driver") if "step" in span.facts]
    for step, turn in zip(whole.summary["steps"], turns, strict=True):
        assert turn.facts["step"] == step["step"]
        within = [span for span in timeline.of("driver") if turn.start <= span.start and span.end <= turn.end]
        for phase, seconds in step["seconds"].items():
            spans = [span for span in within if span.name == phase]
            if phase == "generate":
                spans = [
                    span for span in timeline.of("rollout manager", phase) if span.facts["rollout"] == step["step"]
                ]
            elif phase == "evaluate":  # between two steps
                spans = [span for span in timeline.of("driver", phase) if span.start >= turn.end]
            elif phase == "total":  # without saving, and up to the report of the step
                assert 0 <= turn.seconds - step["seconds"].get("save", 0.0) - seconds < 0.5
                continue
            assert sum(span.seconds for span in spans) == pytest.approx(seconds, abs=0.02), phase


def test_every_sample_has_one_request_in_the_timeline(whole, timeline):
    asked = [span.facts for span in timeline.of("rollout manager", row="requests")]
    samples = [sample for step in range(STEPS) for sample in read_dump(whole.folder / f"dumps/{step}.jsonl").samples]
    requests = sorted(
        (facts["rollout"], facts["sample"], facts["tokens"]) for facts in asked if "evaluation" not in facts
    )
    per_step = len(samples) // STEPS
    assert requests == sorted((n // per_step, sample.index, sample.response_length) for n, sample in enumerate(samples))


def test_timeline_of_a_killed_run_continues_on_resume(resumed):
    timeline = read_trace(resumed.run_dir / "timeline.json.gz")
    assert any("unfinished" in span.facts for span in timeline.of("driver"))
    steps = {span.facts["step"] for span in timeline.of("driver") if "step" in span.facts}
    assert steps == set(range(STEPS))


def test_training_data_is_recorded_per_sample(whole):
    for step in (0, STEPS - 1):
        data = torch.load(whole.folder / f"train_data/{step}.pt", weights_only=True)
        trained, sampled = data["samples"], read_dump(whole.folder / f"dumps/{step}.jsonl").samples
        assert [sample["sample_id"] for sample in trained] == [sample.index for sample in sampled]
        assert {sample["data_parallel_rank"] for sample in trained} == {0, 1}
        for sample, was in zip(trained, sampled, strict=True):
            assert sample["tokens"].tolist() == was.tokens and sample["raw_reward"] == was.reward
            assert torch.equal(sample["rollout_log_probs"], torch.tensor(was.rollout_log_probs))
            # grpo: every token of a response has its normalized reward
            assert torch.equal(sample["advantages"], torch.full((was.response_length,), sample["reward"]))
        apart = torch.cat([(sample["train_log_probs"] - sample["rollout_log_probs"]).abs() for sample in trained])
        summary = whole.summary["steps"][step]
        assert float(apart.max()) == pytest.approx(summary["train_rollout_logprob_abs_diff_max"])
        assert float(apart.mean()) == pytest.approx(summary["train_rollout_logprob_abs_diff_mean"])
        away = torch.cat([(sample["train_log_probs"] - sample["ref_log_probs"]).abs() for sample in trained])
        assert (float(away.max()) < 1e-5) == (step == 0)


# -- repeated and resumed ----------------------------------------------------------------------------------------------


def test_second_run_with_the_same_flags_prints_the_same_numbers(whole, resumed):
    for name in ("reward", "loss", "grad_norm"):
        assert whole.steps(name)[:3] == resumed.steps(name)[:3]


def test_killed_run_resumes_bit_for_bit(whole, resumed):
    begun = int(resumed.output.split("rollouts ")[1].split()[0])
    assert 0 < begun < STEPS  # it was killed between its first save and its end
    assert resumed.steps("step") == list(range(STEPS))
    for name in ("reward", "loss", "grad_norm"):
        assert whole.steps(name) == resumed.steps(name)
    states = [checkpoints.read(run.folder / "checkpoints" / LAST) for run in (whole, resumed)]
    names = " ".join(states[0])
    for part in ("word_embeddings.weight", "exp_avg.", "exp_avg_sq.", "rng_state", "common", "data_state"):
        assert part in names
    assert checkpoints.differences(*states) == []


def test_training_on_recorded_rollouts_gives_the_same_checkpoint_after_a_kill(tiny, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replayed")
    first = harness.start("train.py", replay(tiny, whole, folder), folder, "replayed", tiny.home)
    first.wait_for_line("iter_0000002", 150)
    first.kill_everything()
    done = harness.start("train.py", replay(tiny, whole, folder), folder, "replayed", tiny.home).finish(100)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("loss") == whole.steps("loss")
    states = [checkpoints.read(root / "checkpoints" / LAST) for root in (whole.folder, folder)]
    assert checkpoints.differences(*states) == []


def test_finished_run_reports_it_and_keeps_its_summary(tiny, whole, tmp_path):
    before = (whole.run_dir / "summary.json").read_text()
    flags = replay(tiny, whole, whole.folder)
    done = harness.start("train.py", flags, whole.folder, "whole", tiny.home).finish(100)
    assert done.code == 0, done.output[-6000:]
    assert "nothing is left to do" in done.output
    assert done.steps("reward") == [step["reward"] for step in json.loads(before)["steps"]]


# -- export and serving ------------------------------------------------------------------------------------------------


def test_exported_model_in_transformers_gives_megatron_logits(tiny, whole):
    folder = serving.exported(tiny, whole.folder / "checkpoints" / LAST, whole.folder / "hf")
    assert serving.largest_logit_gap(tiny, whole.folder / "checkpoints" / LAST, folder) < 1e-5


def test_exported_model_chats_like_transformers(tiny, whole, tmp_path):
    folder = serving.exported(tiny, whole.folder / "checkpoints" / LAST, whole.folder / "hf")
    questions = ["12+34=", "58+27=", "99+11="]
    with serving.served(folder, tmp_path) as url:
        answers = [serving.chat(url, question) for question in questions]
    assert answers == [serving.greedy(folder, question) for question in questions]
    assert answers[0].startswith("\\boxed{")


# -- without a login -------------------------------------------------------------------------------------------------


@pytest.fixture
def tried(whole):
    if whole.attempts is None:
        pytest.skip("only root becomes another user")
    assert whole.attempts.answers  # with the key every server answers
    assert set(whole.attempts.answers.values()) == {200}
    return whole.attempts


def test_other_users_cannot_read_or_write_files_of_a_run(tried):
    assert tried.read == []
    assert tried.written == []


def test_other_users_cannot_call_servers_of_a_run(tried):
    assert tried.called == []
    assert not tried.executed
    assert tried.ray_answer == "UNAUTHENTICATED"
    (metrics,) = tried.metrics  # only numbers: request counts and lengths
    assert all(line.startswith(("# ", "smg_")) for line in metrics.splitlines() if line)


def test_other_machines_cannot_reach_a_run(tried):
    assert {one.ip for one in tried.listeners} == {"127.0.0.1"}
    if tried.reached is None:
        pytest.skip("this machine cannot be given a second network")
    assert tried.control_reached
    assert tried.reached == []


def test_run_key_is_in_no_command_line_and_no_file(tried):
    assert tried.key_seen == []
