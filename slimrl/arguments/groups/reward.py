"""Flags of the reward."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

RM_TYPES = tuple(prefix + name for prefix in ("", "boxed_") for name in ("deepscaler", "math", "random"))
KNOWN_RM_TYPES = tuple(
    prefix + name for prefix in ("", "boxed_") for name in ("dapo", "f1", "gpqa", "ifbench", "remote_rm")
)


@dataclasses.dataclass
class RewardArguments:
    """How a response is judged."""

    rm_type: str | None = flag(
        None,
        "built-in reward, with boxed_ the last \\boxed{} wherever it stands; a sample's metadata.rm_type goes first",
        choices=RM_TYPES + KNOWN_RM_TYPES,
        not_served=f"use one of {', '.join(RM_TYPES)}, or --custom-rm-path",
        served=RM_TYPES,
    )
    custom_rm_path: str | None = flag(None, "reward function (dotted import path); goes before --rm-type")
    group_rm: bool = flag(
        False,
        "judge a whole group in one call",
        not_served="responses are judged one by one; use --custom-reward-post-process-path to compare a group",
    )
    rm_url: str | None = flag(
        None, "address of a reward service", not_served="call it from a function of your own, --custom-rm-path"
    )
    reward_key: str | None = flag(None, "entry to train on where the reward is a dict")
    custom_reward_post_process_path: str | None = flag(
        None, "function that turns raw rewards into training rewards (dotted import path; group normalisation)"
    )
