"""Rules about rollouts: required flags, asynchrony, partial rollouts, evaluation, prompt lengths and rewards.

Asynchronous generation needs train_async.py, compatible flags, and engines that support it. A reward service needs an
address, a reward model a folder that SGLang can serve, and a dict reward a key.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from slimrl.algorithms.estimators import ESTIMATORS
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, RM_TYPES
from slimrl.arguments.hf_config import TOKENIZER_FILES, RewardModelConfig, starts_reward_servers
from slimrl.arguments.namespace import Arguments, Context, EvalDataset, missing
from slimrl.data.prompt_format import DataMix
from slimrl.data.reward_registry import BuiltInReward, GradedBy, reward_of

_BOUND, _IN_FLIGHT = "--max-weight-staleness", "--update-weights-in-flight"
_RETRACTION_IS_RIGHT_FROM = (0, 5, 21)


def asynchrony_has_its_program(args: Arguments, context: Context) -> Iterator[Problem]:
    """train.py is synchronous and rejects the flags of asynchronous generation."""
    if context.entry != "train.py":
        return
    for flag, value in (
        (f"{_BOUND} {args.max_weight_staleness}", args.max_weight_staleness is not None),
        (_IN_FLIGHT, args.update_weights_in_flight and args.max_weight_staleness is None),
    ):
        if value:
            yield Problem(
                flag.split()[0],
                f"{flag} belongs to train_async.py, and train.py is synchronous: start train_async.py, or leave it"
                f" out.",
            )


def continuous_generation_is_alone(args: Arguments, context: Context) -> Iterator[Problem]:
    """Fully asynchronous generation rejects flags that divide generation into rollouts."""
    if args.max_weight_staleness is None:
        return
    subject = f"{_BOUND} {args.max_weight_staleness} generates fully asynchronously"
    if args.has_custom_rollout_function:
        yield Problem(
            "--rollout-function-path",
            f"{subject}, and --rollout-function-path {args.rollout_function_path} makes one rollout at a time: leave"
            f" one"
            " of the two out; --custom-generate-function-path generates single samples.",
        )
    if args.partial_rollout:
        yield Problem(
            "--partial-rollout",
            f"{subject} and never interrupts responses at the end of a rollout: leave --partial-rollout out.",
        )
    if args.discard_surplus_groups:
        yield Problem(
            "--discard-surplus-groups",
            f"{subject} and has no surplus groups: leave --discard-surplus-groups out; groups that are too old are"
            " regenerated.",
        )
    if "over_sampling_batch_size" in context.given:
        yield Problem(
            "--over-sampling-batch-size",
            f"{subject}: the number of groups in flight follows from {_BOUND} and --sglang-server-concurrency; leave"
            f" --over-sampling-batch-size {args.over_sampling_batch_size} out.",
        )


def weight_updates_keep_up(args: Arguments, context: Context) -> Iterator[Problem]:
    """The staleness bound allows the staleness of the last rollout before a weight update."""
    bound, interval = args.max_weight_staleness, args.update_weights_interval
    if bound is not None and bound < interval - 1 and "update_weights_interval" not in context.broken:
        yield Problem(
            _BOUND,
            f"{_BOUND} {bound} is too small for --update-weights-interval {interval}: engines are {interval - 1}"
            f" rollouts behind before each weight update; give at least {interval - 1}, or update more often.",
        )


def in_flight_updates_are_supported(args: Arguments, context: Context) -> Iterator[Problem]:
    """In SGLang before 0.5.21 a request that continues after an update reads KV of the old weights."""
    if context.entry != "train_async.py" or not args.update_weights_in_flight:
        return
    if args.debug_train_only or args.uses_vllm:
        return
    installed = _sglang_version()
    if installed is None or installed[0] >= _RETRACTION_IS_RIGHT_FROM or args.sglang_options.get("disable_radix_cache"):
        return
    cause = (
        f"{_BOUND} {args.max_weight_staleness} updates"
        if args.max_weight_staleness is not None
        else f"{_IN_FLIGHT} updates"
    )
    yield Problem(
        _IN_FLIGHT,
        f"{cause} weights with requests in flight, and SGLang {installed[1]} continues them with stale KV from its"
        f" radix"
        " cache: add --sglang-disable-radix-cache, install sglang 0.5.21 or later, or give"
        " --no-update-weights-in-flight.",
    )


def _sglang_version() -> tuple[tuple[int, ...], str] | None:
    """The version as numbers to compare and as text; None if SGLang is not installed."""
    try:
        text = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3]), text


def evaluation_has_data(args: Arguments, context: Context) -> Iterator[Problem]:
    """--eval-interval without a set would evaluate nothing."""
    sources = {"eval_prompt_data", "eval_config"}
    if args.eval_interval is not None and not sources & (context.given | context.broken):
        yield Problem(
            "--eval-interval",
            f"--eval-interval {args.eval_interval} has nothing to evaluate on: give --eval-prompt-data or"
            " --eval-config.",
        )


def eval_only_has_an_evaluation(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout 0 only evaluates, before the first rollout: that evaluation must take place."""
    if not args.eval_only or {"num_rollout", "eval_interval"} & context.broken:
        return
    if args.eval_interval is None:
        yield Problem(
            "--num-rollout",
            "--num-rollout 0 only evaluates, and no evaluation is configured: give --eval-interval 1 and evaluation"
            " sets, or raise --num-rollout.",
        )
    for flag, given in (
        ("--skip-eval-before-train", args.skip_eval_before_train),
        ("--debug-train-only", args.debug_train_only),
    ):
        if given:
            yield Problem(flag, f"{flag} skips the only evaluation of --num-rollout 0: leave one of them out.")


def evaluation_sets_have_a_reward(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each set has a reward, unless a custom function makes its samples."""
    if args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION or {"rm_type", "custom_rm_path"} & context.broken:
        return
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    for dataset in args.eval_datasets:
        # another rule checks the run's own --rm-type
        if dataset.rm_type not in (None, args.rm_type, *RM_TYPES):
            known = ", ".join(RM_TYPES)
            yield Problem(flag, f"{flag}: set {dataset.name} has rm_type {dataset.rm_type!r}: give one of {known}.")
        has_reward = dataset.rm_type or dataset.custom_rm_path or dataset.custom_generate_function_path
        if not has_reward and args.eval_config is not None:
            yield Problem(flag, f"{flag}: no reward for set {dataset.name}: give it rm_type or custom_rm_path.")


def lengths_fit_the_context(args: Arguments, context: Context) -> Iterator[Problem]:
    """A prompt leaves room for at least one token of response."""
    limit, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if limit is not None and prompt is not None and prompt > limit - 1:
        yield Problem(
            "--rollout-max-prompt-len",
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {limit}:"
            f" give at most {limit - 1}.",
        )


def reward_service_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """remote_rm needs --rm-url, an HTTP address."""
    if args.rm_model is not None or args.has_served_teacher:
        return  # the address of the reward model's server, or of the teacher's
    if args.rm_url is None:
        users = _graded_by(args, GradedBy.SERVICE)
        if users:
            yield Problem(
                "--rm-url", f"{users[0]} needs a reward service: give its address, --rm-url http://host:port/..."
            )
    elif not args.rm_url.startswith(("http://", "https://")):
        yield Problem("--rm-url", f"--rm-url {args.rm_url} is not an address: begin it with http:// or https://.")


def reward_model_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """reward_model has a model with one output and enough context; reward model flags have a model."""
    if args.has_served_teacher:
        return  # the servers are the teacher's
    if args.rm_model is None:
        users = _graded_by(args, GradedBy.REWARD_MODEL)
        if users:
            yield Problem("--rm-model", f"{users[0]} needs a reward model: give its folder, --rm-model.")
        for flag in sorted({"rm_num_gpus", "rm_num_gpus_per_engine", "rm_server_options", "rm_input"} & context.given):
            spelled = "--" + flag.replace("_", "-")
            yield Problem(
                spelled, f"{spelled} belongs to a reward model, and there is none: give --rm-model, or leave it out."
            )
        return
    users = _graded_by(args, GradedBy.SERVICE)
    if users:
        yield Problem(
            "--rm-model",
            f"{users[0]} needs --rm-url, which with --rm-model is the address of that model's server: give one.",
        )
    for address in (args.rm_url or "http://").split(","):
        if not address.strip().startswith(("http://", "https://")):
            yield Problem("--rm-url", f"--rm-url {address} is not an address: begin it with http:// or https://.")
    if starts_reward_servers(args) and args.rm_num_gpus % args.rm_num_gpus_per_engine:
        yield Problem(
            "--rm-num-gpus",
            f"--rm-num-gpus {args.rm_num_gpus} is not a multiple of --rm-num-gpus-per-engine"
            f" {args.rm_num_gpus_per_engine}: choose a multiple.",
        )
    yield from _reward_model_folder(args, args.rm_model)


def _reward_model_folder(args: Arguments, folder: str) -> Iterator[Problem]:
    try:
        config = RewardModelConfig.read(Path(folder))
    except ValueError as error:
        yield Problem("--rm-model", str(error))
        return
    fault = config.fault if args.rm_step_separator is None else config.fault_of_steps
    if fault is not None:
        yield Problem("--rm-model", f"--rm-model {folder} {fault}: give another.")
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        yield Problem("--rm-model", f"--rm-model {folder} has no tokenizer: copy the model's tokenizer there.")
    longest = args.rollout_max_response_len
    if config.context is not None and longest is not None and longest >= config.context:
        yield Problem(
            "--rm-model",
            f"--rm-model {args.rm_model} has a context of {config.context} tokens (max_position_embeddings), and a"
            f" response may have {longest} (--rollout-max-response-len): lower that, or give a model with a longer"
            " context.",
        )


def dict_rewards_have_a_key(args: Arguments, context: Context) -> Iterator[Problem]:
    """A dict reward has a key that selects the entry to train on."""
    for name, row, key in _built_in(args):
        processed = name.startswith("--rm-type") and args.custom_reward_post_process_path is not None
        if row.entries and key is None and not processed:
            flag = "--reward-key" if name.startswith("--rm-type") else "--eval-reward-key"
            *others, last = row.entries
            entries = f"{', '.join(others)} and {last}" if others else last
            yield Problem(flag, f"{name} gives a dict with {entries}: give {flag} {row.entries[0]}.")


def _graded_by(args: Arguments, by: GradedBy) -> list[str]:
    """The flags and sets that select a built-in reward graded by `by`."""
    return [name for name, row, _ in _built_in(args) if row.by is by]


def _built_in(args: Arguments) -> Iterator[tuple[str, BuiltInReward, str | None]]:
    """The flag or set, built-in reward and reward key of each known built-in reward in use."""
    chosen: list[tuple[str, Arguments | EvalDataset]] = [("--rm-type", args)]
    chosen += [(f"evaluation set {dataset.name} with rm_type", dataset) for dataset in args.eval_datasets]
    for where, of in chosen:
        row = None if of.rm_type is None else reward_of(of.rm_type)
        if row is not None and of.custom_rm_path is None:
            yield f"{where} {of.rm_type}", row, of.reward_key


def groups_can_be_compared(args: Arguments, context: Context) -> Iterator[Problem]:
    """With one response per prompt, every group-normalised reward is zero."""
    if args.custom_reward_post_process_path is not None or "n_samples_per_prompt" in context.broken:
        return
    if args.custom_advantage_function_path is not None:  # which also gets the raw rewards
        return
    if args.is_supervised or args.eval_only or args.debug_rollout_only:
        return
    if args.use_opd and args.rm_type == "zero" and args.custom_rm_path is None:  # the teacher alone
        return
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is None or not estimator.is_group_relative or not args.rewards_normalization:
        return
    if args.n_samples_per_prompt == 1:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt 1 leaves {args.advantage_estimator} nothing to compare and every advantage would"
            " be 0: give at least 2, or add --disable-rewards-normalization.",
        )


def normalized_rewards_have_a_use(args: Arguments, context: Context) -> Iterator[Problem]:
    """--normalize-reward scales rewards that training reads, and that no later division by a deviation undoes."""
    if not args.normalize_reward:
        return
    for flag, value, given in (
        ("--custom-reward-post-process-path", args.custom_reward_post_process_path, True),
        ("--custom-convert-samples-to-train-data-path", args.custom_convert_samples_to_train_data_path, True),
        ("--loss-type", args.loss_type, args.loss_type not in ("policy_loss", "custom_loss")),
    ):
        if given and value is not None:
            yield Problem(
                "--normalize-reward",
                f"--normalize-reward has no effect with {flag} {value}, which does not train on the built-in rewards:"
                " leave it out.",
            )
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is None or not estimator.is_group_relative or not args.rewards_normalization:
        return
    if estimator.normalizes_by_std and args.grpo_std_normalization:
        yield Problem(
            "--normalize-reward",
            f"--normalize-reward has no effect, because --advantage-estimator {args.advantage_estimator} divides by the"
            " standard deviation of each group: leave it out, or add --disable-grpo-std-normalization.",
        )


def reward_is_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """Responses have a reward, unless a custom function makes the samples."""
    own_samples = (
        args.custom_generate_function_path is not None
        or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        or args.debug_train_only
    )
    if own_samples or {"rm_type", "custom_rm_path"} & context.broken:
        return
    if args.rm_type is None and args.custom_rm_path is None:
        alone = " (--rm-type zero: train on the teacher alone)" if args.use_opd else ""
        yield Problem("--rm-type", f"no reward for the responses: give --rm-type or --custom-rm-path{alone}.")


_TRAINING = ("hf_checkpoint", "prompt_data", "rollout_batch_size", "rollout_max_response_len")


def training_flags_are_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """The required flags besides the model's are given."""
    spared = {"rollout_max_response_len"} if args.debug_train_only else set()
    if args.has_custom_data_source or not args.rollout_global_dataset or args.eval_only:
        spared.add("prompt_data")
    if args.eval_only and all(dataset.max_response_len is not None for dataset in args.eval_datasets):
        spared.add("rollout_max_response_len")
    for name in missing(args, context, [name for name in _TRAINING if name not in spared]):
        yield Problem(name, f"{name} is missing: every run needs it.")


def run_has_a_length(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout or --num-epoch is given."""
    if args.num_rollout is None and args.num_epoch is None and not {"num_rollout", "num_epoch"} & context.broken:
        yield Problem("--num-rollout", "the run has no length: give --num-rollout or --num-epoch.")


def epochs_have_an_end(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-epoch alone sets the length of the run only if an epoch is defined."""
    if args.num_epoch is None or args.num_rollout is not None:
        return
    if not args.rollout_global_dataset and not args.has_custom_data_source:
        yield Problem(
            "--num-epoch",
            f"--num-epoch {args.num_epoch} counts passes over --prompt-data, and --disable-rollout-global-dataset has"
            " none: give --num-rollout.",
        )
    elif args.prompt_data is not None and "prompt_data" not in context.broken and _has_probabilities(args.prompt_data):
        yield Problem(
            "--num-epoch",
            f"--num-epoch {args.num_epoch} is ambiguous for a mixture by probability, whose sets have different epochs:"
            " give --num-rollout.",
        )


def _has_probabilities(prompt_data: str | list[str]) -> bool:
    try:
        return DataMix.parse(prompt_data).probabilities is not None
    except ValueError:  # another rule reports it
        return False


def over_sampling_reaches_the_batch(args: Arguments, context: Context) -> Iterator[Problem]:
    """--over-sampling-batch-size is at least --rollout-batch-size."""
    over, batch = args.over_sampling_batch_size, args.rollout_batch_size
    if over is not None and batch is not None and over < batch:
        yield Problem(
            "--over-sampling-batch-size",
            f"--over-sampling-batch-size {over} is smaller than --rollout-batch-size {batch}: give at least {batch}.",
        )


def partial_rollout_flags_are_exclusive(args: Arguments, context: Context) -> Iterator[Problem]:
    """Masking needs --partial-rollout; --partial-rollout and --discard-surplus-groups exclude each other."""
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        yield Problem(
            "--mask-offpolicy-in-partial-rollout",
            "--mask-offpolicy-in-partial-rollout needs --partial-rollout: add it, or leave the flag out.",
        )
    if args.discard_surplus_groups and args.partial_rollout:
        yield Problem(
            "--discard-surplus-groups",
            "--discard-surplus-groups regenerates finished groups and --partial-rollout keeps even unfinished ones:"
            " give one of the two.",
        )
