"""Rules about the learning algorithm, evaluation and hooks.

The recipe and its variants pass, each violation is one error.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from tests.arguments.test_rules_of_preference import UNREAD, UNREAD_OF_SAMPLING

# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "trained_weights_have_one_list": (
        ["--freeze-params-name-list embedding router", r"--only-train-params-name-list layers\\.3[0-5]\\."],
        [
            (
                "--only-train-params-name-list mlp --freeze-params-name-list embedding router",
                "--only-train-params-name-list mlp and --freeze-params-name-list embedding router exclude each other:"
                " give one.",
            ),
            (
                "--freeze-params-name-list",
                "--freeze-params-name-list is given without a regular expression: give at least one, or leave it out.",
            ),
            (
                "--freeze-params-name-list layers[",
                "--freeze-params-name-list layers[ is not a regular expression (unterminated character set at position"
                " 6).",
            ),
        ],
    ),
    "kernels_are_installed": (
        ["--transformer-impl local"],
        [
            (
                "--transformer-impl transformer_engine",
                "--transformer-impl transformer_engine needs a package that is not installed: install"
                " transformer_engine, or leave the flag out.",
            )
        ],
    ),
    "estimator_has_what_it_needs": (
        [
            "--advantage-estimator reinforce_plus_plus --gamma 0.99",
            "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
            "--advantage-estimator gspo --eps-clip 4e-4 --eps-clip-high 4e-4",
            *(f"--advantage-estimator {name} --disable-grpo-std-normalization" for name in ("grpo", "gspo", "cispo")),
            *(f"--advantage-estimator {name} --disable-rewards-normalization" for name in ("rloo", "opo", "grpo")),
        ],
        [
            (
                "--gamma 0.99",
                "--gamma 0.99 discounts the returns of reinforce_plus_plus and ppo and --advantage-estimator is grpo:"
                " leave it out.",
            ),
            *(
                (
                    f"--advantage-estimator {name} --disable-grpo-std-normalization",
                    f"--disable-grpo-std-normalization has no effect with --advantage-estimator {name}, which never"
                    " divides by the standard deviation (those that do: grpo, gspo, cispo): leave it out.",
                )
                for name in ("rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
            ),
            (
                "--advantage-estimator reinforce_plus_plus --disable-rewards-normalization",
                "--disable-rewards-normalization has no effect with --advantage-estimator reinforce_plus_plus, whose"
                " rewards are never relative to their group (those that are: grpo, dr_grpo, gspo, cispo,"
                " reinforce_plus_plus_baseline, rloo, opo): leave it out.",
            ),
        ],
    ),
    "length_normalization_has_its_divisor": (
        [
            "--advantage-estimator dr_grpo",
            "--advantage-estimator dr_grpo --use-kl-loss --kl-loss-coef 0.1",
        ],
        [
            (
                f"--advantage-estimator dr_grpo {flags}",
                f"{flags} sets another divisor of the loss, and --advantage-estimator dr_grpo divides the sum of a"
                " sample by --rollout-max-response-len: leave it out, or use grpo with"
                " --disable-grpo-std-normalization.",
            )
            for flags in (
                "--calculate-per-token-loss",
                "--custom-pg-loss-reducer-function-path examples.policy_loss.by_constant",
            )
        ],
    ),
    "log_prob_passes_have_a_use": (
        [
            "--compute-old-log-probs always",
            "--use-kl-loss --kl-loss-coef 0 --ref-kl-metric-interval 10",
            "--use-kl-loss --kl-loss-coef 0 --rollout-data-postprocess-path examples.training.leave_out_sure_tokens"
            " --ref-kl-metric-interval 1",
        ],
        [
            (
                "--use-kl-loss --kl-loss-coef 0.1 --ref-kl-metric-interval 10",
                "--ref-kl-metric-interval 10 is not used: --kl-loss-coef 0.1 needs the reference for every rollout."
                " Leave it out.",
            ),
            (
                "--kl-loss-coef 0 --kl-coef 0.1 --ref-kl-metric-interval 10",
                "--ref-kl-metric-interval 10 is not used: --kl-coef 0.1 needs the reference for every rollout. Leave it"
                " out.",
            ),
            (
                "--use-kl-loss --kl-loss-coef 0 --rollout-data-postprocess-path examples.training.leave_out_sure_tokens"
                " --ref-kl-metric-interval 2",
                "--ref-kl-metric-interval 2 leaves out log-probabilities that --rollout-data-postprocess-path"
                " examples.training.leave_out_sure_tokens may read: leave the interval out.",
            ),
            ("--ref-kl-metric-interval 0", "--ref-kl-metric-interval 0 is too small: it must be at least 1."),
        ],
    ),
    "off_policy_corrections_are_consistent": (
        [
            "--use-tis --tis-clip 3 --tis-clip-low 0.5",
            "--use-opsm --opsm-delta 1e-3",
            "--use-unbiased-kl",
            "--positive-example-loss-coef 0.1 --positive-example-reward 0",
        ],
        [
            (
                "--use-tis --use-rollout-logprobs",
                "--use-tis and --use-rollout-logprobs would correct the same difference twice: give one.",
            ),
            ("--use-tis --tis-clip-low 2", "--tis-clip-low 2 is not below --tis-clip 2: lower it."),
            ("--tis-clip 3", "--tis-clip belongs to --use-tis: add it, or leave --tis-clip out."),
            ("--tis-level sequence", "--tis-level belongs to --use-tis: add it, or leave --tis-level out."),
            (
                "--positive-example-reward 0.5",
                "--positive-example-reward belongs to --positive-example-loss-coef: add it, or leave"
                " --positive-example-reward out.",
            ),
            ("--tis-mode mask", "--tis-mode belongs to --use-tis: add it, or leave --tis-mode out."),
            (
                "--tis-batch-normalize",
                "--tis-batch-normalize belongs to --use-tis: add it, or leave --tis-batch-normalize out.",
            ),
            (
                "--rs-veto-threshold 1e-4",
                "--rs-veto-threshold belongs to --use-rs: add it, or leave --rs-veto-threshold out.",
            ),
            ("--opsm-delta 1e-3", "--opsm-delta belongs to --use-opsm: add it, or leave --opsm-delta out."),
        ],
    ),
    "rejection_has_bounds": (
        [
            "--use-rs --rs-level sequence --rs-lower-bound 0.5 --rs-upper-bound 2",
            "--use-tis --tis-level geometric --tis-mode mask --use-rs --rs-veto-threshold 1e-4",
            "--use-rs --rs-upper-bound 2 --use-rollout-logprobs",
            "--use-tis --use-rs --custom-tis-function-path examples.policy_loss.reject",
        ],
        [
            (
                "--use-rs",
                "--use-rs has no bound and rejects nothing: give --rs-lower-bound, --rs-upper-bound or"
                " --rs-veto-threshold.",
            ),
            (
                "--use-rs --rs-level geometric --rs-veto-threshold 1e-4",
                "--rs-level geometric is the level of bounds, and none is given (those of --tis-clip are not taken, as"
                " slime does): give --rs-lower-bound or --rs-upper-bound, or leave it out.",
            ),
            (
                "--use-rs --rs-lower-bound 2 --rs-upper-bound 0.5",
                "--rs-lower-bound 2 is not below --rs-upper-bound 0.5: lower it.",
            ),
            (
                "--use-rs --rs-upper-bound 2 --rs-veto-threshold 1",
                "--rs-veto-threshold 1 is too large: it must be below 1.",
            ),
        ],
    ),
    "normalized_rewards_have_a_use": (
        [
            "--normalize-reward --advantage-estimator reinforce_plus_plus",
            "--normalize-reward --advantage-estimator rloo",
            "--normalize-reward --disable-grpo-std-normalization",
            "--normalize-reward --disable-rewards-normalization",
        ],
        [
            (
                "--normalize-reward",
                "--normalize-reward has no effect, because --advantage-estimator grpo divides by the standard deviation"
                " of each group: leave it out, or add --disable-grpo-std-normalization.",
            ),
            (
                "--normalize-reward --advantage-estimator rloo"
                " --custom-reward-post-process-path examples.reward.leave_one_out",
                "--normalize-reward has no effect with --custom-reward-post-process-path examples.reward.leave_one_out,"
                " which does not train on the built-in rewards: leave it out.",
            ),
            (
                "--normalize-reward --advantage-estimator rloo"
                " --custom-convert-samples-to-train-data-path slimrl_test_hooks.convert",
                "--normalize-reward has no effect with --custom-convert-samples-to-train-data-path"
                " slimrl_test_hooks.convert, which does not train on the built-in rewards: leave it out.",
            ),
        ],
    ),
    "overlong_penalty_is_complete": (
        [
            "--overlong-buffer-len 512",
            "--overlong-buffer-len 512 --overlong-penalty-factor 0.5 --mask-truncated-samples",
        ],
        [
            (
                "--mask-truncated-samples --custom-convert-samples-to-train-data-path slimrl_test_hooks.convert",
                "--mask-truncated-samples has no effect, because --custom-convert-samples-to-train-data-path"
                " slimrl_test_hooks.convert makes the loss masks: leave it out, and mask them there.",
            ),
            (
                "--overlong-penalty-factor 0.5",
                "--overlong-penalty-factor belongs to --overlong-buffer-len: add it, or leave"
                " --overlong-penalty-factor out.",
            ),
            (
                "--overlong-buffer-len 512 --rollout-max-response-len 256",
                "--overlong-buffer-len 512 is above --rollout-max-response-len 256: lower it.",
            ),
            (
                "--overlong-buffer-len 512 --custom-reward-post-process-path examples.reward.leave_one_out",
                "--overlong-buffer-len 512 has no effect, because --custom-reward-post-process-path"
                " examples.reward.leave_one_out makes the training rewards: leave it out, and subtract the penalty"
                " there.",
            ),
        ],
    ),
    "supervised_training_is_consistent": (
        [],
        [
            (
                "--disable-compute-advantages-and-returns",
                "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages: leave it"
                " out.",
            ),
        ],
    ),
    "precision_is_single": (
        ["--bf16", "--fp16"],
        [("--bf16 --fp16", "--bf16 and --fp16 exclude each other: give one, or neither for fp32.")],
    ),
    "kl_is_counted_once": (
        ["--kl-coef 0.01", "--kl-loss-coef 0.01"],
        [
            (
                "--kl-coef 0.01 --kl-loss-coef 0.02",
                "--kl-coef 0.01 and --kl-loss-coef 0.02 would count the KL twice: set one of them to 0.",
            )
        ],
    ),
    "kl_target_has_a_coefficient": (
        ["--kl-loss-coef 0 --kl-coef 0.1 --kl-target 6 --kl-horizon 20000"],
        [
            ("--kl-horizon 20000", "--kl-horizon belongs to --kl-target: add it, or leave --kl-horizon out."),
            (
                "--kl-loss-coef 0 --kl-coef 0.1 --kl-target 6 --kl-horizon 20000 --loss-type custom_loss"
                " --custom-loss-function-path tests.megatron.custom_functions.loss"
                " --disable-compute-advantages-and-returns",
                "--kl-target 6 moves a penalty of advantages, which this --loss-type custom_loss does not have: leave"
                " it out.",
            ),
            (
                "--kl-target 6",
                "--kl-target 6 has no coefficient to move: give --kl-coef above 0, its first value.",
            ),
            (
                "--kl-loss-coef 0 --kl-coef 0.1 --kl-target 6 --kl-horizon 10",
                "--kl-horizon 10 is below the 256 samples of a rollout, and --kl-coef would jump: raise it.",
            ),
            (
                "--kl-loss-coef 0 --kl-coef 0.1 --kl-target 6 --custom-advantage-function-path"
                " examples.advantages.discounted",
                "--kl-target 6 moves the penalty of the built-in advantages, and --custom-advantage-function-path"
                " examples.advantages.discounted replaces them: leave it out.",
            ),
        ],
    ),
    "entropy_target_has_a_loss": (
        ["--entropy-target 0.2", "--entropy-target 0.2 --entropy-coef-delta 0.001 --entropy-coef 0.001"],
        [
            (
                "--entropy-coef-delta 0.001",
                "--entropy-coef-delta belongs to --entropy-target: add it, or leave --entropy-coef-delta out.",
            ),
            (
                "--entropy-target 0.2 --loss-type custom_loss"
                " --custom-loss-function-path tests.megatron.custom_functions.loss",
                "--entropy-target 0.2 has no effect with --loss-type custom_loss: leave it out.",
            ),
            (
                "--entropy-target 0.2 --entropy-coef -0.1",
                "--entropy-coef -0.1 is below 0, where --entropy-target never moves it: give 0 or more.",
            ),
        ],
    ),
    "groups_can_be_compared": (
        ["--n-samples-per-prompt 1 --disable-rewards-normalization"],
        [
            (
                "--n-samples-per-prompt 1",
                "--n-samples-per-prompt 1 leaves grpo nothing to compare and every advantage would be 0: give at least"
                " 2, or add --disable-rewards-normalization.",
            )
        ],
    ),
    "clip_range_is_ordered": (
        ["--eps-clip-c 3"],
        [
            (
                "--eps-clip-c 1.2",
                "--eps-clip-c 1.2 is not above 1 + --eps-clip-high = 1.28: raise it, or leave it out.",
            ),
            (
                "--advantage-estimator cispo --eps-clip-c 3",
                "--eps-clip-c 3 bounds a loss that --advantage-estimator cispo does not have (--eps-clip-high already"
                " bounds its weights): leave it out.",
            ),
        ],
    ),
    "schedule_is_complete": (
        [
            "--lr-warmup-iters 5 --lr-decay-iters 6",
            "--min-lr 1e-6",
            "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-wsd-decay-style linear",
            "--decoupled-lr 1e-5 --decoupled-min-lr 1e-6",
        ],
        [
            ("--min-lr 1e-5", "--min-lr 1e-05 is above --lr 1e-06: lower it."),
            ("--lr-warmup-init 1e-5", "--lr-warmup-init 1e-05 is above --lr 1e-06: lower it."),
            (
                "--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
                "--lr-warmup-fraction 0.1 and --lr-warmup-iters 5 both set the warm-up: give one.",
            ),
            (
                "--lr-warmup-iters 5 --lr-decay-iters 5",
                "--lr-warmup-iters 5 is not below --lr-decay-iters 5: the decay begins after the warm-up.",
            ),
            (
                "--lr-decay-style WSD",
                "--lr-decay-style WSD needs --lr-wsd-decay-iters: give the optimizer steps of the decay at the end.",
            ),
            (
                "--lr-wsd-decay-iters 9",
                "--lr-wsd-decay-iters 9 belongs to --lr-decay-style WSD: add it, or leave --lr-wsd-decay-iters out.",
            ),
            (
                "--decoupled-min-lr 1e-7",
                "--decoupled-min-lr 1e-07 belongs to --decoupled-lr: add it, or leave --decoupled-min-lr out.",
            ),
        ],
    ),
    "lengths_fit_the_context": (
        ["--rollout-max-context-len 100", "--rollout-max-context-len 100 --rollout-max-prompt-len 99"],
        [
            (
                "--rollout-max-context-len 100 --rollout-max-prompt-len 100",
                "--rollout-max-prompt-len 100 leaves no room for a response in --rollout-max-context-len 100: give at"
                " most 99.",
            )
        ],
    ),
    "hooks_keep_their_contracts": (
        [
            "--custom-rm-path slimrl_test_hooks.judge",
            "--dynamic-sampling-filter-path slimrl_test_hooks.keep",
            "--rollout-sample-hook-path slimrl_test_hooks.judge slimrl_test_hooks.keep",
            "--buffer-filter-path slime.rollout.filter_hub.buffer_filters.pop_first",
            "--eval-function-path slime.rollout.sglang_rollout.generate_rollout",
            "--custom-generate-function-path slimrl_test_hooks.generate",
        ],
        [
            (
                "--rollout-sample-hook-path slimrl_test_hooks.judge slimrl_test_hooks.generate",
                "--rollout-sample-hook-path slimrl_test_hooks.generate: slimrl_test_hooks.generate(args, sample,"
                " sampling_params, *, engine) cannot be called as needed (missing a required argument:"
                " 'sampling_params'): expected async or ordinary f(args, sample).",
            ),
            *[
                (
                    f"{flag} slimrl_test_hooks.judg",
                    f"{flag} slimrl_test_hooks.judg: module slimrl_test_hooks has no judg: did you mean judge?",
                )
                for flag in (
                    "--buffer-filter-path",
                    "--eval-function-path",
                    "--rollout-sample-filter-path",
                    "--rollout-all-samples-process-path",
                    "--custom-rollout-log-function-path",
                    "--custom-eval-rollout-log-function-path",
                    "--custom-convert-samples-to-train-data-path",
                )
            ],
            (
                "--custom-rm-path slimrl_test_hooks.judg",
                "--custom-rm-path slimrl_test_hooks.judg: module slimrl_test_hooks has no judg: did you mean judge?",
            ),
            (
                "--custom-rm-path slimrl_test_hooks.keep",
                "--custom-rm-path slimrl_test_hooks.keep: slimrl_test_hooks.keep is not async: expected async"
                " f(args, sample).",
            ),
        ],
    ),
    "eval_only_has_an_evaluation": (
        ["--num-rollout 0"],
        [
            (
                "--num-rollout 0 --skip-eval-before-train",
                "--skip-eval-before-train skips the only evaluation of --num-rollout 0: leave one of them out.",
            ),
        ],
    ),
}

# rules whose violation is a removed flag or another config.json: tested below, or in a separate file
TESTED_APART = {
    "reward_is_given",
    "evaluation_has_data",
    "evaluation_sets_have_a_reward",
    "shape_is_possible",
    "model_agrees_with_hf_config",
    "remote_code_is_trusted",
}

HOOKS = """
async def judge(args, sample, **kwargs):
    return 1.0

def keep(args, samples, **kwargs):
    return True

async def generate(args, sample, sampling_params, *, engine):
    return sample

def convert(args, samples):
    return {}
"""


@pytest.fixture
def in_a_folder_with_hooks(tmp_path, monkeypatch):
    (tmp_path / "slimrl_test_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more, in_a_folder_with_hooks):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence, in_a_folder_with_hooks):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == [sentence.format(dir=recipe.dir)]


def test_kl_coefficient_without_its_loss_is_rejected(recipe):
    _, problems = read_args(recipe.line("--kl-loss-coef 0.1", without="--use-kl-loss"))
    assert [str(problem) for problem in problems] == [
        "--kl-loss-coef 0.1 is the weight of a loss that is off: add --use-kl-loss, or leave it out."
    ]


def test_kl_interval_without_a_computed_kl_is_rejected(recipe):
    _, problems = read_args(recipe.line("--ref-kl-metric-interval 2", without="--use-kl-loss"))
    assert [str(problem) for problem in problems] == [
        "--ref-kl-metric-interval 2 belongs to --use-kl-loss: add it, or leave the interval out."
    ]


@pytest.mark.parametrize(
    "more",
    [
        "--use-kl-loss",
        "--kl-coef 0.1 --ref-load {dir}/ref",
        "--advantage-estimator rloo",
        "--eps-clip 0.1",
        "--gamma 0.9",
        "--rollout-max-prompt-len 100",
        *UNREAD,
    ],
)
def test_supervised_training_has_no_flags_of_reinforcement_learning(recipe, more):
    assert read_args(recipe.supervised_line())[1] == []
    flag = more.split()[0]
    assert f"{flag} has no effect with --loss-type sft_loss: leave it out." in [
        str(problem) for problem in read_args(recipe.supervised_line(more))[1]
    ]


def test_flags_of_sampling_are_for_sampled_responses_alone(recipe):
    line = recipe.supervised_line()
    rollout = ["--rollout-function-path", "slimrl.rollout.sft_rollout.generate_rollout", "--n-samples-per-prompt", "1"]
    for more in UNREAD_OF_SAMPLING:
        flag, sentence = more.split()[0], f"{more.split()[0]} has no effect with --loss-type sft_loss: leave it out."
        assert sentence not in [str(problem) for problem in read_args([*line, *more.split()])[1]], flag
        given = [*line, *rollout, *more.split()]
        assert sentence in [str(problem) for problem in read_args([*given, "--debug-train-only"])[1]], flag
        served = [str(problem) for problem in read_args([*given, "--eval-function-path", "examples.evaluation.run"])[1]]
        of_engines = ("--check", "--group-rm", "--reward-key", "--rm-num", "--rollout-top", "--rollout-stop")
        assert (sentence in served) is not flag.startswith(of_engines), flag


def test_supervised_loss_is_not_scaled_by_the_temperature_of_sampling(recipe):
    line = recipe.supervised_line("--rollout-temperature 0.8")
    assert [str(problem) for problem in read_args(line)[1]] == [
        "--rollout-temperature 0.8 also divides the logits of training, which changes the loss of --loss-type sft_loss:"
        " give 1, or leave it out; responses sampled with another temperature are trained on from a file"
        " (--save-debug-rollout-data with --debug-rollout-only, then --load-debug-rollout-data)."
    ]
    assert read_args([*line, "--debug-rollout-only"])[1] == []


def test_conversations_are_not_repeated(recipe):
    rollout = "--rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --debug-train-only"
    line = recipe.supervised_line(f"{rollout} --n-samples-per-prompt 2")
    problems = [str(problem) for problem in read_args(line)[1]]
    assert "--n-samples-per-prompt 2 repeats each conversation: give 1, or leave it out." in problems
    assert "--rm-type has no effect with --loss-type sft_loss: leave it out." in problems


def test_forced_pass_is_rejected_for_supervised_training(recipe):
    line = recipe.supervised_line("--compute-old-log-probs always")
    assert [str(problem) for problem in read_args(line)[1]] == [
        "--compute-old-log-probs always computes what --loss-type sft_loss without advantages does not read: leave it"
        " out."
    ]


def test_evaluation_only_needs_eval_data_but_no_training_data(recipe):
    for flag in ("--prompt-data", "--rollout-max-response-len", "--rollout-batch-size", "--n-samples-per-prompt"):
        assert read_args(recipe.line("--num-rollout 0", without=flag))[1] == []
    _, problems = read_args(recipe.line("--num-rollout 0", without="--eval-interval"))
    assert [str(problem) for problem in problems] == [
        "--num-rollout 0 only evaluates, and no evaluation is configured: give --eval-interval 1 and evaluation sets,"
        " or raise --num-rollout."
    ]


def test_disabled_features_are_noted(recipe):
    args, _ = read_args(recipe.line("--tensor-model-parallel-size 1 --num-epoch 3"))
    assert not args.sequence_parallel
    assert args.notes == [
        "--sequence-parallel is off: it needs --tensor-model-parallel-size above 1.",
        "--num-epoch 3 is ignored: --num-rollout 3000 takes precedence.",
    ]
    args, _ = read_args(recipe.line(without="--eval-interval"))
    assert args.notes == ["no evaluation will run: evaluation sets are given without --eval-interval."]


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        ("--partial-rollout --over-sampling-batch-size 64", []),
        ("--partial-rollout", ["--partial-rollout has no effect: only --rollout-batch-size"]),
        (
            "--over-sampling-batch-size 64",
            ["--over-sampling-batch-size 64 is ignored: without --dynamic-sampling-filter-path"],
        ),
        ("--partial-rollout --dynamic-sampling-filter-path slimrl_test_hooks.keep", []),
        ("--over-sampling-batch-size 64 --dynamic-sampling-filter-path slimrl_test_hooks.keep", []),
    ],
)
def test_sampling_flags_without_effect_are_noted(recipe, in_a_folder_with_hooks, flags, notes):
    args, problems = read_args(recipe.line(flags))
    assert problems == []
    assert [any(note.startswith(start) for note in args.notes) for start in notes] == [True] * len(notes)
    assert len(args.notes) == len(notes)


@pytest.mark.parametrize(
    ("more", "on"),
    [
        ("--advantage-estimator reinforce_plus_plus", True),
        ("--advantage-estimator reinforce_plus_plus_baseline", True),
        ("--advantage-estimator grpo", False),
        ("--advantage-estimator grpo --normalize-advantages", True),
        ("--advantage-estimator reinforce_plus_plus --loss-type sft_loss", False),
    ],
)
def test_estimators_defined_with_whitened_advantages_whiten_them(recipe, more, on):
    assert read_args(recipe.line(more))[0].normalize_advantages is on


def test_dr_grpo_needs_the_longest_response_and_its_own_loss(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    dumps = "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl --advantage-estimator dr_grpo"
    line = recipe.line(dumps, without="--rollout-max-response-len")
    divides = "--advantage-estimator dr_grpo divides the sum of a sample by --rollout-max-response-len"
    sentences = [str(problem) for problem in read_args(line)[1]]
    assert f"{divides}, which is missing: give that of the rollouts." in sentences
    own = "--loss-type custom_loss --custom-loss-function-path examples.loss.reinforce --advantage-estimator dr_grpo"
    sentences = [str(problem) for problem in read_args(recipe.line(own))[1]]
    assert any(
        one.startswith(f"--loss-type custom_loss sets another divisor of the loss, and {divides}") for one in sentences
    )
    said = {"dr_grpo": "--advantage-estimator dr_grpo", "dapo": "--calculate-per-token-loss"}
    for loss, flag in said.items():
        sentences = [str(problem) for problem in read_args(recipe.line(f"--loss-type {loss}"))[1]]
        assert any(f"give policy_loss with {flag}" in one for one in sentences)
