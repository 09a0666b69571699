"""Flags of the reward."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag

_RULES = ("dapo", "deepscaler", "f1", "gpqa", "ifbench", "ifeval", "math", "random", "remote_rm")
RM_TYPES = (*(prefix + name for prefix in ("", "boxed_") for name in _RULES), "reward_model")


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
    rm_url: str | None = flag(
        None,
        "address of the reward service that --rm-type remote_rm asks; with --rm-model the address of an SGLang server"
        " with that model which runs already, several with commas between them",
    )
    rm_model: str | None = flag(
        None,
        "reward model that --rm-type reward_model asks (Hugging Face folder, a sequence classifier with one label);"
        " without --rm-url its servers are started on slots of their own",
    )
    rm_num_gpus: int = flag(1, "slots of the reward model's servers, behind those of training and rollout", at_least=1)
    rm_num_gpus_per_engine: int = flag(1, "slots of one server of the reward model", at_least=1)
    rm_server_options: dict[str, Any] = flag(
        {}, 'flags of SGLang for the reward model\'s servers (JSON object), as in {"mem_fraction_static": 0.8}'
    )
    rm_input: str | None = flag(
        None,
        "what the reward model reads: the conversation in its own chat template, prompt and response as text, or the"
        " policy's token ids as they are (conversation where it has a template; else tokens where its tokenizer is the"
        " policy's, else text)",
        choices=("conversation", "text", "tokens"),
    )
    rm_concurrency: int = flag(64, "requests in flight per server of the reward model", at_least=1)
    rm_failure_limit: float = flag(
        1.0,
        "end the run where at least this share of a rollout's samples got no verdict from their graders; above 1 never",
        above=0,
    )
    rm_time_limit: float = flag(5.0, "time that a built-in grader has for one answer (s); then it is killed", above=0)
    rm_num_graders: int | None = flag(
        None, "processes that built-in graders run in (a quarter of the cores, 2 to 16)", at_least=1
    )
    reward_key: str | None = flag(None, "entry to train on where the reward is a dict")
    custom_reward_post_process_path: str | None = flag(
        None, "function that turns raw rewards into training rewards (dotted import path; group normalisation)"
    )
