"""Rules about asynchronous generation, evaluation, prompt lengths and rewards.

Asynchronous generation needs its program (train_async.py), flags that go with it, and engines that can do it. A reward
service needs an address, a reward model a folder that SGLang can serve, and a dict reward a key.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.engines import TOKENIZER_FILES, RewardModelConfig, starts_reward_servers
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION, RM_TYPES
from slimrl.arguments.namespace import Arguments, EvalDataset
from slimrl.arguments.validation.rule import Context
from slimrl.data.reward_table import BuiltInReward, GradedBy, reward_of

_BOUND, _IN_FLIGHT = "--max-weight-staleness", "--update-weights-in-flight"
_RETRACTION_IS_RIGHT_FROM = (0, 5, 21)


def asynchrony_has_its_program(args: Arguments, context: Context) -> Iterator[Problem]:
    """train.py generates and trains in turns: nothing goes stale and nothing is in flight."""
    if context.entry != "train.py":
        return
    for flag, value in (
        (f"{_BOUND} {args.max_weight_staleness}", args.max_weight_staleness is not None),
        (_IN_FLIGHT, args.update_weights_in_flight and args.max_weight_staleness is None),
    ):
        if value:
            yield Problem(
                flag.split()[0],
                f"{flag} belongs to train_async.py; with train.py generation and training take turns: start"
                " train_async.py, or leave it out.",
            )


def continuous_generation_is_alone(args: Arguments, context: Context) -> Iterator[Problem]:
    """What cuts generation into rollouts has no meaning where it is fully asynchronous."""
    if args.max_weight_staleness is None:
        return
    endless = f"{_BOUND} {args.max_weight_staleness} generates fully asynchronously"
    if args.has_own_rollout_function:
        yield Problem(
            "--rollout-function-path",
            f"{endless}, and --rollout-function-path {args.rollout_function_path} makes one rollout after the other:"
            " leave one of the two out; --custom-generate-function-path makes single samples.",
        )
    if args.partial_rollout:
        yield Problem(
            "--partial-rollout",
            f"{endless}, and no rollout cuts anything off to be continued: leave --partial-rollout out.",
        )
    if args.discard_surplus_groups:
        yield Problem(
            "--discard-surplus-groups",
            f"{endless}, and no rollout has a surplus: leave --discard-surplus-groups out; what is too old is generated"
            " again.",
        )
    if "over_sampling_batch_size" in context.given:
        yield Problem(
            "--over-sampling-batch-size",
            f"{endless}: how much is in progress follows from {_BOUND} and --sglang-server-concurrency; leave"
            f" --over-sampling-batch-size {args.over_sampling_batch_size} out.",
        )


def weight_updates_keep_up(args: Arguments, context: Context) -> Iterator[Problem]:
    """The last rollout before a weight update trains on the oldest weights that the engines ever have."""
    bound, interval = args.max_weight_staleness, args.update_weights_interval
    if bound is not None and bound < interval - 1 and "update_weights_interval" not in context.broken:
        yield Problem(
            _BOUND,
            f"{_BOUND} {bound} cannot be kept with --update-weights-interval {interval}, with which engines are"
            f" {interval - 1} rollouts behind before each weight update: give at least {interval - 1}, or update more"
            " often.",
        )


def requests_can_go_on(args: Arguments, context: Context) -> Iterator[Problem]:
    """SGLang before 0.5.21 lets a request that continues after an update read the old weights' keys and values."""
    if context.entry != "train_async.py" or not args.update_weights_in_flight or args.debug_train_only:
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
        f"{cause} weights under running requests, which SGLang {installed[1]} continues with stale keys and values out"
        " of its radix cache: add --sglang-disable-radix-cache, install sglang 0.5.21 or later, or give"
        " --no-update-weights-in-flight.",
    )


def _sglang_version() -> tuple[tuple[int, ...], str] | None:
    """As numbers to compare and as text; None where it is not installed here."""
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


def evaluation_alone_evaluates(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout 0 trains nothing: the evaluation before the first rollout is all there is."""
    if not args.only_evaluates or {"num_rollout", "eval_interval"} & context.broken:
        return
    if args.eval_interval is None:
        yield Problem(
            "--num-rollout",
            "--num-rollout 0 trains nothing and nothing is evaluated: give --eval-interval 1 (and sets), or rollouts.",
        )
    for flag, given in (
        ("--skip-eval-before-train", args.skip_eval_before_train),
        ("--debug-train-only", args.debug_train_only),
    ):
        if given:
            yield Problem(flag, f"{flag} leaves out the one evaluation of --num-rollout 0: leave one of them out.")


def evaluation_sets_are_judged(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each set has a reward, unless the user's own function makes its samples."""
    if args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION or {"rm_type", "custom_rm_path"} & context.broken:
        return
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    for dataset in args.eval_datasets:
        # the run's own --rm-type is another rule's business
        if dataset.rm_type not in (None, args.rm_type, *RM_TYPES):
            known = ", ".join(RM_TYPES)
            yield Problem(flag, f"{flag}: set {dataset.name} has rm_type {dataset.rm_type!r}: give one of {known}.")
        judged = dataset.rm_type or dataset.custom_rm_path or dataset.custom_generate_function_path
        if not judged and args.eval_config is not None:
            yield Problem(flag, f"{flag}: nothing judges set {dataset.name}: give it rm_type or custom_rm_path.")


def lengths_fit_the_context(args: Arguments, context: Context) -> Iterator[Problem]:
    """A prompt leaves room for at least one token of response."""
    limit, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if limit is not None and prompt is not None and prompt > limit - 1:
        yield Problem(
            "--rollout-max-prompt-len",
            f"--rollout-max-prompt-len {prompt} leaves no response within --rollout-max-context-len {limit}:"
            f" give at most {limit - 1}.",
        )


def reward_service_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """remote_rm asks --rm-url, which is an HTTP address."""
    if args.rm_model is not None:
        return  # the address of the reward model's server
    if args.rm_url is None:
        asking = _graded_by(args, GradedBy.SERVICE)
        if asking:
            yield Problem(
                "--rm-url", f"{asking[0]} asks a reward service: give its address, --rm-url http://host:port/..."
            )
    elif not args.rm_url.startswith(("http://", "https://")):
        yield Problem("--rm-url", f"--rm-url {args.rm_url} is no address: begin it with http:// or https://.")


def reward_model_can_be_asked(args: Arguments, context: Context) -> Iterator[Problem]:
    """reward_model has a model that gives one number and reads whole samples; the flags about it have one too."""
    if args.rm_model is None:
        asking = _graded_by(args, GradedBy.REWARD_MODEL)
        if asking:
            yield Problem("--rm-model", f"{asking[0]} asks a reward model: give its folder, --rm-model.")
        for flag in sorted({"rm_num_gpus", "rm_num_gpus_per_engine", "rm_server_options", "rm_input"} & context.given):
            spelled = "--" + flag.replace("_", "-")
            yield Problem(
                spelled, f"{spelled} is about the reward model, and there is none: give --rm-model, or leave it out."
            )
        return
    asking = _graded_by(args, GradedBy.SERVICE)
    if asking:
        yield Problem(
            "--rm-model",
            f"{asking[0]} asks --rm-url, which with --rm-model is the address of that model's server: give one.",
        )
    for address in (args.rm_url or "http://").split(","):
        if not address.strip().startswith(("http://", "https://")):
            yield Problem("--rm-url", f"--rm-url {address} is no address: begin it with http:// or https://.")
    if starts_reward_servers(args) and args.rm_num_gpus % args.rm_num_gpus_per_engine:
        yield Problem(
            "--rm-num-gpus",
            f"--rm-num-gpus {args.rm_num_gpus} is no multiple of --rm-num-gpus-per-engine"
            f" {args.rm_num_gpus_per_engine}: servers take whole shares of it.",
        )
    yield from _reward_model_folder(args, args.rm_model)


def _reward_model_folder(args: Arguments, folder: str) -> Iterator[Problem]:
    try:
        config = RewardModelConfig.read(Path(folder))
    except ValueError as error:
        yield Problem("--rm-model", str(error))
        return
    if config.fault is not None:
        yield Problem("--rm-model", f"--rm-model {folder} {config.fault}: give another.")
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        yield Problem("--rm-model", f"--rm-model {folder} has no tokenizer: copy it there, it reads with its own.")
    longest = args.rollout_max_response_len
    if config.context is not None and longest is not None and longest >= config.context:
        yield Problem(
            "--rm-model",
            f"--rm-model {args.rm_model} reads {config.context} tokens (max_position_embeddings), and a response may"
            f" have {longest} (--rollout-max-response-len): lower that, or give a model that reads more.",
        )


def dict_rewards_have_a_key(args: Arguments, context: Context) -> Iterator[Problem]:
    """Of a reward that is a dict one entry is trained on."""
    for name, row, key in _built_in(args):
        processed = name.startswith("--rm-type") and args.custom_reward_post_process_path is not None
        if row.entries and key is None and not processed:
            flag = "--reward-key" if name.startswith("--rm-type") else "--eval-reward-key"
            *others, last = row.entries
            entries = f"{', '.join(others)} and {last}" if others else last
            yield Problem(flag, f"{name} gives a dict with {entries}: give {flag} {row.entries[0]}.")


def _graded_by(args: Arguments, by: GradedBy) -> list[str]:
    """Where a built-in reward is chosen that `by` grades."""
    return [name for name, row, _ in _built_in(args) if row.by is by]


def _built_in(args: Arguments) -> Iterator[tuple[str, BuiltInReward, str | None]]:
    """Where a built-in reward is chosen, which, and the entry to take of it; not those that are unknown."""
    chosen: list[tuple[str, Arguments | EvalDataset]] = [("--rm-type", args)]
    chosen += [(f"evaluation set {dataset.name} with rm_type", dataset) for dataset in args.eval_datasets]
    for where, of in chosen:
        row = None if of.rm_type is None else reward_of(of.rm_type)
        if row is not None and of.custom_rm_path is None:
            yield f"{where} {of.rm_type}", row, of.reward_key
