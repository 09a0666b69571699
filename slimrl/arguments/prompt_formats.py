"""How the flags say that rows of prompt data are read: those of training, and those of an evaluation set."""

from __future__ import annotations

from slimrl.arguments.engine_context import least
from slimrl.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments, EvalDataset
from slimrl.data.prompt_format import PromptFormat


def training_prompt_format(args: Arguments) -> PromptFormat:
    """How the rows of `--prompt-data` are read."""
    return PromptFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        apply_chat_template=args.apply_chat_template,
        chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=least(args.rollout_max_prompt_len, _engine_limit(args)),
        refuse_too_long=args.refuse_long_prompts,
        keep_messages=args.custom_generate_function_path is not None or args.has_own_rollout_function,
        keep_conversation=args.rm_model is not None,
        reward_rule=_rule(args, args.rm_type, args.custom_rm_path, args.custom_generate_function_path),
    )


def eval_prompt_format(args: Arguments, dataset: EvalDataset) -> PromptFormat:
    """How the rows of an evaluation set are read."""
    return PromptFormat(
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        apply_chat_template=dataset.apply_chat_template,
        chat_template_kwargs=dataset.apply_chat_template_kwargs,
        max_prompt_len=least(dataset.max_prompt_len, _engine_limit(args)),
        refuse_too_long=args.refuse_long_prompts,
        keep_messages=dataset.custom_generate_function_path is not None,
        keep_conversation=args.rm_model is not None,
        reward_rule=_rule(args, dataset.rm_type, dataset.custom_rm_path, dataset.custom_generate_function_path),
    )


def _engine_limit(args: Arguments) -> int | None:
    """The longest prompt that leaves an engine room for a response; a function of one's own asks as it likes."""
    if args.engine_context_len is None or args.has_own_rollout_function:
        return None
    return args.engine_context_len - 1


def _rule(args: Arguments, rm_type: str | None, custom_rm: str | None, custom_generate: str | None) -> str | None:
    """The built-in reward that compares with the row's label; None where a function of the user's may change either."""
    own = custom_rm or custom_generate or args.rollout_sample_hook_path or args.debug_train_only
    return None if own or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION else rm_type
