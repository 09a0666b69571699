"""Flags of the reward."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

_RULES = ("dapo", "deepscaler", "f1", "gpqa", "ifbench", "ifeval", "math", "random", "remote_rm")
RM_TYPES = tuple(prefix + name for prefix in ("", "boxed_") for name in _RULES)


@dataclasses.dataclass
class RewardArguments:
    """How a response is judged."""

    rm_type: str | None = flag(
        None,
        "built-in reward, with boxed_ the last \\boxed{} wherever it stands; a sample's metadata.rm_type goes first",
        choices=RM_TYPES,
    )
    custom_rm_path: str | None = flag(None, "reward function (dotted import path); goes before --rm-type")
    group_rm: bool = flag(
        False, "judge a whole group in one call: --custom-rm-path is then async f(args, samples), a list of rewards"
    )
    rm_url: str | None = flag(None, "address of the reward service that --rm-type remote_rm asks")
    rm_time_limit: float = flag(5.0, "time that a built-in grader has for one answer (s); then it is killed", above=0)
    rm_num_graders: int | None = flag(
        None, "processes that built-in graders run in (a quarter of the cores, 2 to 16)", at_least=1
    )
    reward_key: str | None = flag(None, "entry to train on where the reward is a dict")
    custom_reward_post_process_path: str | None = flag(
        None, "function that turns raw rewards into training rewards (dotted import path; group normalisation)"
    )
