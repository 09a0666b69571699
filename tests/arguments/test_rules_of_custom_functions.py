"""Custom training functions: which flags pass, and the error for a function that would never be called."""

from __future__ import annotations

import pytest

from slimrl.arguments.parse import read_args

HOOKS = """
def loss(args, batch, logits, sum_of_sample_mean): ...
def loss_short(args, batch, logits): ...
def advantage(args, rollout_data): ...
def correct(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **more): ...
def correct_less(args, *, pg_loss, train_log_probs): ...
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False): ...
def see(args, rollout_id, rollout_data): ...
def provide(pre_process=True, post_process=True): ...
def provide_stage(pre_process, post_process, vp_stage=None, *, args, config): ...
def spec(args, config, vp_stage): ...
def init(args): ...
def before_log_prob(args, model, store_prefix): ...
def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): ...
def written(args, version_dir, rollout_engines): ...
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_hooks(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("own", None)


GOOD = [
    "--loss-type custom_loss --custom-loss-function-path own.loss",
    "--loss-type custom_loss --custom-loss-function-path own.loss --keep-logits",
    "--custom-advantage-function-path own.advantage",
    "--use-tis --custom-tis-function-path own.correct --custom-pg-loss-reducer-function-path own.reducer",
    "--rollout-data-postprocess-path own.see --custom-megatron-init-path own.init",
    "--custom-model-provider-path own.provide",
    "--custom-model-provider-path own.provide_stage",
    "--spec own spec",
    "--custom-megatron-before-log-prob-hook-path own.before_log_prob"
    " --custom-megatron-before-train-step-hook-path own.before_step",
    "--update-weight-transport disk --update-weight-disk-dir weights"
    " --custom-update-weight-post-write-path own.written",
]
BAD = [
    (
        "--loss-type custom_loss",
        ["--loss-type custom_loss has no loss: give --custom-loss-function-path, or --loss-type policy_loss."],
    ),
    (
        "--custom-loss-function-path own.loss",
        [
            "--custom-loss-function-path own.loss is not called with --loss-type policy_loss: add --loss-type"
            " custom_loss, or leave it out."
        ],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path own.loss --use-tis --use-opsm",
        [
            "--use-tis corrects the policy loss, and --loss-type is custom_loss: leave it out.",
            "--use-opsm corrects the policy loss, and --loss-type is custom_loss: leave it out.",
        ],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path own.loss"
        " --custom-pg-loss-reducer-function-path own.reducer",
        [
            "--custom-pg-loss-reducer-function-path own.reducer is part of the policy loss, and --loss-type is"
            " custom_loss: leave it out."
        ],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path own.loss --disable-compute-advantages-and-returns"
        " --custom-advantage-function-path own.advantage",
        [
            "--custom-advantage-function-path own.advantage is never called: --loss-type custom_loss computes no"
            " log-probabilities before training and no advantages. Leave it out."
        ],
    ),
    (
        "--custom-tis-function-path own.correct",
        ["--custom-tis-function-path own.correct belongs to --use-tis: add it, or leave the path out."],
    ),
    ("--spec own", ["--spec own is not two words: give a module and a function in it."]),
    (
        "--spec own spec --custom-model-provider-path own.provide",
        ["--spec own spec and --custom-model-provider-path own.provide both build the layers: give one."],
    ),
    (
        "--custom-update-weight-post-write-path own.written",
        [
            "--custom-update-weight-post-write-path own.written is never called, because --update-weight-transport nccl"
            " writes no files: add --update-weight-transport disk, or leave it out."
        ],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path own.loss_short",
        [
            "--custom-loss-function-path own.loss_short: own.loss_short(args, batch, logits) cannot be called as needed"
            " (too many positional arguments): expected f(args, batch, logits, sum_of_sample_mean)."
        ],
    ),
    ("--spec own specs", ["--spec own.specs: module own has no specs: did you mean spec?"]),
    (
        "--custom-megatron-init-path own.before_step",
        [
            "--custom-megatron-init-path own.before_step: own.before_step(args, rollout_id, step_id, model, optimizer,"
            " opt_param_scheduler) cannot be called as needed (missing a required argument: 'rollout_id'): expected"
            " f(args)."
        ],
    ),
]


@pytest.mark.parametrize("more", GOOD)
def test_functions_that_are_called_are_accepted(recipe, more):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(("more", "sentences"), BAD)
def test_function_that_cannot_be_called_is_one_error(recipe, more, sentences):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == sentences


def test_custom_loss_keeps_the_logits(recipe):
    assert read_args(recipe.line("--loss-type custom_loss --custom-loss-function-path own.loss"))[0].keep_logits
    assert not read_args(recipe.line(""))[0].keep_logits


def test_custom_advantage_allows_one_response_per_prompt(recipe):
    one = "--n-samples-per-prompt 1 --rollout-batch-size 256"
    assert len(read_args(recipe.line(one))[1]) == 1
    assert read_args(recipe.line(f"{one} --custom-advantage-function-path own.advantage"))[1] == []
