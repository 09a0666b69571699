"""Rules about rewards: services have an address, rewards that are dicts have a key to train on."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_DICT_RULE = "dapo"
_SERVICE = "remote_rm"


def reward_service_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """remote_rm asks --rm-url, which is an HTTP address."""
    if args.rm_url is None:
        asking = [name for name, rm_type, _ in _built_in(args) if rm_type.endswith(_SERVICE)]
        if asking:
            yield Problem(
                "--rm-url", f"{asking[0]} asks a reward service: give its address, --rm-url http://host:port/..."
            )
    elif not args.rm_url.startswith(("http://", "https://")):
        yield Problem("--rm-url", f"--rm-url {args.rm_url} is no address: begin it with http:// or https://.")


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
