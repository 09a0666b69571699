"""Conversations become samples whose loss mask is 1 exactly on the assistant's text."""

import pytest

from slimrl.data.sample import SampleStatus
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.metrics import EvaluationReport
from slimrl.rollout.sft_rollout import generate_rollout, held_out_conversations

USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "two"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def samples_of(make_args, write_rows, tokenizer):
    """The samples of one supervised rollout over rows."""

    def run(rows, **overrides):
        values = {
            "prompt_data": write_rows(rows),
            "input_key": "messages",
            "label_key": None,
            "rollout_function_path": "slimrl.rollout.sft_rollout.generate_rollout",
            "rollout_batch_size": len(rows),
            "n_samples_per_prompt": 1,
        }
        args = make_args(**{**values, **overrides})
        output = generate_rollout(args, 0, RolloutDataSource(args, tokenizer), tokenizer=tokenizer)
        return [sample for group in output.groups for sample in group]

    return run


def test_assistant_text_and_its_end_token_are_trained(samples_of, tokenizer):
    (sample,) = samples_of([{"messages": [USER, ASSISTANT, USER, ASSISTANT]}])
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    trained = [token for token, chosen in zip(response, sample.loss_mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "two<|im_end|>two<|im_end|>"
    assert tokenizer.decode(response).startswith("two<|im_end|>\n<|im_start|>user\n1+1<|im_end|>")


def test_tool_schemas_of_a_row_are_in_the_trained_conversation(samples_of, tokenizer):
    with_tools, without = samples_of([{"messages": [USER, ASSISTANT], "tools": TOOLS}, {"messages": [USER, ASSISTANT]}])
    assert tokenizer.decode(with_tools.tokens) == tokenizer.decode(without.tokens) + "[1 tools]"


def test_conversation_is_rendered_once_with_and_without_the_flag(samples_of):
    rows = [{"messages": [USER, ASSISTANT]}]
    (with_flag,), (without,) = samples_of(rows, apply_chat_template=True), samples_of(rows)
    assert (with_flag.tokens, with_flag.loss_mask) == (without.tokens, without.loss_mask)


def test_rendered_text_is_rejected_with_the_flag_of_its_column(samples_of):
    with pytest.raises(ValueError, match=r"'messages' \(--input-key\) is text and must be a list of messages"):
        samples_of([{"messages": "<|im_start|>user"}])


def test_held_out_conversations_of_a_reward_model_have_their_scores(
    make_args, make_eval_dataset, write_rows, tokenizer
):
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    path = write_rows([{"messages": talk, "score": score} for score in (0.5, -2)], "held-out.jsonl")
    args = make_args(
        loss_type="reward_model_loss",
        reward_model_loss="mse",
        rollout_function_path="slimrl.rollout.sft_rollout.generate_rollout",
        debug_train_only=True,
        label_key="score",
        eval_interval=1,
    )
    assert args.evaluates_held_out
    dataset = make_eval_dataset(name="rest", path=path, input_key="messages", label_key="score", rm_type=None)
    batch = held_out_conversations(args, dataset, tokenizer)
    assert batch.raw_rewards.tolist() == [0.5, -2.0]
    bad = write_rows([{"messages": talk, "score": "high"}], "bad.jsonl")
    with pytest.raises(ValueError, match="score"):
        held_out_conversations(
            args,
            make_eval_dataset(name="rest", path=bad, input_key="messages", label_key="score", rm_type=None),
            tokenizer,
        )


def test_report_of_held_out_scores_is_their_mean_error():
    report = EvaluationReport.of_held_out("rest", {"loss": 0.5, "absolute_error": 0.6, "predicted_reward": 1.0})
    assert report.mean_reward == 0.6 and report.metrics() == {"eval/rest": 0.6, "eval/rest-loss": 0.5}


def test_longer_conversation_is_cut_at_its_end_and_counted(samples_of, tokenizer):
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]
    whole, short = samples_of(rows)
    limit = len(short.tokens)
    cut, kept = samples_of(rows, rollout_max_context_len=limit)
    assert cut.tokens == whole.tokens[:limit] and cut.response == tokenizer.decode(cut.tokens[cut.prompt_length :])
    assert cut.loss_mask == whole.loss_mask[: cut.response_length]
    assert (cut.status, kept.status) == (SampleStatus.TRUNCATED, SampleStatus.COMPLETED)
    assert kept.tokens == short.tokens
    with pytest.raises(ValueError, match="train.jsonl:1 has .*--rollout-max-context-len 2 cuts off the rest: raise"):
        samples_of(rows, rollout_max_context_len=2)


def test_held_out_conversation_that_the_limit_leaves_nothing_of_is_named_with_its_line(
    make_args, make_eval_dataset, write_rows, tokenizer
):
    long = [{"role": "user", "content": "1+1" * 20}, ASSISTANT]
    path = write_rows([{"messages": [USER, ASSISTANT]}, {"messages": long}])
    args = make_args(
        loss_type="sft_loss",
        rollout_function_path="slimrl.rollout.sft_rollout.generate_rollout",
        debug_train_only=True,
    )
    held_out = make_eval_dataset(
        name="rest", path=path, input_key="messages", label_key=None, rm_type=None, max_context_len=60
    )
    with pytest.raises(ValueError, match=r"^evaluation set rest, \S*train.jsonl:2 has \d+ tokens before the first one"):
        held_out_conversations(args, held_out, tokenizer)


def test_calls_of_the_assistant_are_trained_and_answers_of_tools_are_not(samples_of, tokenizer):
    call = {"role": "assistant", "content": "call f"}
    (sample,) = samples_of([{"messages": [USER, call, {"role": "tool", "content": "42"}, ASSISTANT], "tools": TOOLS}])
    response = sample.tokens[sample.prompt_length :]
    trained = [token for token, chosen in zip(response, sample.loss_mask, strict=True) if chosen]
    assert tokenizer.decode(trained) == "call f<|im_end|>two<|im_end|>" and "42" in tokenizer.decode(response)
