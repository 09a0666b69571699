"""Rules about rewards: services have an address, reward models a folder that can be served, dict rewards a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.reward_model import REWARD_MODEL, TOKENIZER_FILES, RewardModelConfig, starts_reward_servers
from slimrl.arguments.rules.context import Context

_DICT_RULE = "dapo"
_SERVICE = "remote_rm"


def reward_service_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """remote_rm asks --rm-url, which is an HTTP address."""
    if args.rm_model is not None:
        return  # the address of the reward model's server
    if args.rm_url is None:
        asking = [name for name, rm_type, _ in _built_in(args) if rm_type.endswith(_SERVICE)]
        if asking:
            yield Problem(
                "--rm-url", f"{asking[0]} asks a reward service: give its address, --rm-url http://host:port/..."
            )
    elif not args.rm_url.startswith(("http://", "https://")):
        yield Problem("--rm-url", f"--rm-url {args.rm_url} is no address: begin it with http:// or https://.")


def reward_model_can_be_asked(args: Arguments, context: Context) -> Iterator[Problem]:
    """reward_model has a model that gives one number and reads whole samples; the flags about it have one too."""
    if args.rm_model is None:
        asking = [name for name, rm_type, _ in _built_in(args) if rm_type == REWARD_MODEL]
        if asking:
            yield Problem("--rm-model", f"{asking[0]} asks a reward model: give its folder, --rm-model.")
        for flag in sorted({"rm_num_gpus", "rm_num_gpus_per_engine", "rm_server_options", "rm_input"} & context.given):
            spelled = "--" + flag.replace("_", "-")
            yield Problem(
                spelled, f"{spelled} is about the reward model, and there is none: give --rm-model, or leave it out."
            )
        return
    asking = [name for name, rm_type, _ in _built_in(args) if rm_type.endswith(_SERVICE)]
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
    yield from _reward_model_folder(args)


def _reward_model_folder(args: Arguments) -> Iterator[Problem]:
    try:
        config = RewardModelConfig.read(Path(args.rm_model))
    except ValueError as error:
        yield Problem("--rm-model", str(error))
        return
    if config.fault is not None:
        yield Problem("--rm-model", f"--rm-model {args.rm_model} {config.fault}: give another.")
    if not any((Path(args.rm_model) / name).is_file() for name in TOKENIZER_FILES):
        yield Problem(
            "--rm-model", f"--rm-model {args.rm_model} has no tokenizer: copy it there, it reads with its own."
        )
    longest = args.rollout_max_response_len
    if config.context is not None and longest is not None and longest >= config.context:
        yield Problem(
            "--rm-model",
            f"--rm-model {args.rm_model} reads {config.context} tokens (max_position_embeddings), and a response may"
            f" have {longest} (--rollout-max-response-len): lower that, or give a model that reads more.",
        )


def dict_rewards_have_a_key(args: Arguments, context: Context) -> Iterator[Problem]:
    """The dapo reward is a dict: one of its entries is trained on."""
    for name, rm_type, key in _built_in(args):
        processed = name.startswith("--rm-type") and args.custom_reward_post_process_path is not None
        if rm_type.endswith(_DICT_RULE) and key is None and not processed:
            flag = "--reward-key" if name.startswith("--rm-type") else "--eval-reward-key"
            yield Problem(flag, f"{name} gives a dict with score, acc and pred: give {flag} score.")


def _built_in(args: Arguments) -> Iterator[tuple[str, str, str | None]]:
    """Where a built-in reward is chosen, which, and the entry to take of it."""
    if args.rm_type is not None and args.custom_rm_path is None:
        yield f"--rm-type {args.rm_type}", args.rm_type, args.reward_key
    for dataset in args.eval_datasets:
        if dataset.rm_type is not None and dataset.custom_rm_path is None:
            yield f"evaluation set {dataset.name} with rm_type {dataset.rm_type}", dataset.rm_type, dataset.reward_key
