"""Rules about custom functions: every `--...-path` flag names a function that fulfils its contract.

A training function that would never be called is also a problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from slimrl import hooks
from slimrl.arguments.flag import Problem, ended
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments, Context

_BEFORE_LOG_PROB = "--custom-megatron-before-log-prob-hook-path"


def hooks_keep_their_contracts(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every hook can be imported and has the signature of its contract."""
    hook_flags: list[tuple[str, str | None, type[hooks.Hook]]] = [
        ("--rollout-function-path", _own(args.rollout_function_path), hooks.RolloutFunction),
        ("--eval-function-path", _own(args.eval_function_path), hooks.RolloutFunction),
        ("--custom-generate-function-path", args.custom_generate_function_path, hooks.CustomGenerate),
        ("--dynamic-sampling-filter-path", args.dynamic_sampling_filter_path, hooks.DynamicSamplingFilter),
        ("--buffer-filter-path", args.buffer_filter_path, hooks.BufferFilter),
        ("--rollout-sample-filter-path", args.rollout_sample_filter_path, hooks.SampleFilter),
        ("--rollout-all-samples-process-path", args.rollout_all_samples_process_path, hooks.AllSamplesProcess),
        ("--custom-rollout-log-function-path", args.custom_rollout_log_function_path, hooks.RolloutLog),
        ("--custom-eval-rollout-log-function-path", args.custom_eval_rollout_log_function_path, hooks.EvalRolloutLog),
        (
            "--custom-convert-samples-to-train-data-path",
            args.custom_convert_samples_to_train_data_path,
            hooks.ConvertSamples,
        ),
        ("--custom-rm-path", args.custom_rm_path, hooks.CustomReward),
        ("--custom-reward-post-process-path", args.custom_reward_post_process_path, hooks.RewardPostProcess),
        *_of_training(args),
    ]
    hook_flags += [("--rollout-sample-hook-path", path, hooks.SampleHook) for path in args.rollout_sample_hook_path]
    for dataset in args.eval_datasets if args.eval_config is not None else []:
        where = f"--eval-config: set {dataset.name},"
        if dataset.custom_rm_path != args.custom_rm_path:
            hook_flags.append((f"{where} custom_rm_path", dataset.custom_rm_path, hooks.CustomReward))
        if dataset.custom_generate_function_path != args.custom_generate_function_path:
            path = dataset.custom_generate_function_path
            hook_flags.append((f"{where} custom_generate_function_path", path, hooks.CustomGenerate))
    if args.has_custom_data_source:
        try:
            hooks.resolve_data_source(args.data_source_path)
        except hooks.HookError as error:
            yield Problem("--data-source-path", ended(f"--data-source-path {args.data_source_path}: {error}"))
    for flag, path, contract in hook_flags:
        if path is None:
            continue
        try:
            hooks.resolve(path, contract)
        except hooks.HookError as error:
            yield Problem(flag.split(":")[0], ended(f"{flag} {path}: {error}"))


def _of_training(args: Arguments) -> list[tuple[str, str | None, type[hooks.Hook]]]:
    spec = ".".join(args.spec) if args.spec is not None and len(args.spec) == 2 else None
    return [
        ("--custom-loss-function-path", args.custom_loss_function_path, hooks.CustomLoss),
        ("--custom-advantage-function-path", args.custom_advantage_function_path, hooks.CustomAdvantage),
        ("--custom-tis-function-path", args.custom_tis_function_path, hooks.CustomTIS),
        ("--custom-pg-loss-reducer-function-path", args.custom_pg_loss_reducer_function_path, hooks.PgLossReducer),
        ("--rollout-data-postprocess-path", args.rollout_data_postprocess_path, hooks.RolloutDataPostprocess),
        ("--custom-model-provider-path", args.custom_model_provider_path, hooks.ModelProvider),
        ("--spec", spec, hooks.LayerSpec),
        ("--custom-megatron-init-path", args.custom_megatron_init_path, hooks.MegatronInit),
        (
            "--custom-megatron-before-log-prob-hook-path",
            args.custom_megatron_before_log_prob_hook_path,
            hooks.BeforeLogProb,
        ),
        (
            "--custom-megatron-before-train-step-hook-path",
            args.custom_megatron_before_train_step_hook_path,
            hooks.BeforeTrainStep,
        ),
        (
            "--custom-update-weight-post-write-path",
            args.custom_update_weight_post_write_path,
            hooks.UpdateWeightPostWrite,
        ),
    ]


def _own(path: str | None) -> str | None:
    """None for the built-in rollout function."""
    return None if path is None or hooks.own_path(path) == DEFAULT_ROLLOUT_FUNCTION else path


def custom_loss_has_its_function(args: Arguments, context: Context) -> Iterator[Problem]:
    """--loss-type custom_loss and --custom-loss-function-path need each other; no flag corrects a custom loss."""
    own = args.loss_type == "custom_loss"
    if own and args.custom_loss_function_path is None:
        yield Problem(
            "--loss-type",
            "--loss-type custom_loss has no loss: give --custom-loss-function-path, or --loss-type policy_loss.",
        )
    if not own and args.custom_loss_function_path is not None:
        yield Problem(
            "--custom-loss-function-path",
            f"--custom-loss-function-path {args.custom_loss_function_path} is not called with --loss-type"
            f" {args.loss_type}: add --loss-type custom_loss, or leave it out.",
        )
    if not own:
        return
    for flag, given in (("--use-tis", args.use_tis), ("--use-rs", args.use_rs), ("--use-opsm", args.use_opsm)):
        if given:
            yield Problem(flag, f"{flag} corrects the policy loss, and --loss-type is custom_loss: leave it out.")
    if args.positive_example_loss_coef != 0:
        yield Problem(
            "--positive-example-loss-coef",
            f"--positive-example-loss-coef {args.positive_example_loss_coef:g} adds to the policy loss, and --loss-type"
            " is custom_loss: leave it out.",
        )


def parts_of_the_policy_loss_have_one(args: Arguments, context: Context) -> Iterator[Problem]:
    """Custom reducers, corrections and advantage functions need a loss that uses them."""
    for flag, path in (
        ("--custom-tis-function-path", args.custom_tis_function_path),
        ("--custom-pg-loss-reducer-function-path", args.custom_pg_loss_reducer_function_path),
    ):
        if path is not None and args.loss_type != "policy_loss":
            yield Problem(
                flag, f"{flag} {path} is part of the policy loss, and --loss-type is {args.loss_type}: leave it out."
            )
    if args.custom_tis_function_path is not None and not args.use_tis:
        path = args.custom_tis_function_path
        yield Problem(
            "--custom-tis-function-path",
            f"--custom-tis-function-path {path} belongs to --use-tis: add it, or leave the path out.",
        )
    for flag, path in (
        ("--custom-advantage-function-path", args.custom_advantage_function_path),
        (_BEFORE_LOG_PROB, args.custom_megatron_before_log_prob_hook_path),
    ):
        called = args.trains_on_pairs and args.use_reference and flag == _BEFORE_LOG_PROB  # by the reference's pass
        if path is not None and not args.compute_advantages_and_returns and not called:
            yield Problem(
                flag,
                f"{flag} {path} is never called: --loss-type {args.loss_type} computes no log-probabilities before"
                " training and no advantages. Leave it out.",
            )


def custom_model_is_one(args: Arguments, context: Context) -> Iterator[Problem]:
    """--spec is a module and a function, and excludes a model provider."""
    if args.spec is not None and len(args.spec) != 2:
        yield Problem("--spec", f"--spec {' '.join(args.spec)} is not two words: give a module and a function in it.")
    if args.spec is not None and args.custom_model_provider_path is not None:
        yield Problem(
            "--spec",
            f"--spec {' '.join(args.spec)} and --custom-model-provider-path {args.custom_model_provider_path} both"
            f" build"
            " the layers: give one.",
        )


def written_weights_are_files(args: Arguments, context: Context) -> Iterator[Problem]:
    """--custom-update-weight-post-write-path needs the disk transport, the only one that writes files."""
    path = args.custom_update_weight_post_write_path
    if path is not None and args.update_weight_transport != "disk":
        yield Problem(
            "--custom-update-weight-post-write-path",
            f"--custom-update-weight-post-write-path {path} is never called, because --update-weight-transport"
            f" {args.update_weight_transport} writes no files: add --update-weight-transport disk, or leave it out.",
        )
