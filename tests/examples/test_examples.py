"""The examples behave as documented; those that need engines are tested in tests/sglang."""

from __future__ import annotations

import asyncio
import json

import pytest

from examples import calculator, filters, reward, search
from slimrl import hooks
from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import Generation


@pytest.mark.parametrize(
    ("path", "contract"),
    [
        ("calculator.generate", hooks.CustomGenerate),
        ("calculator.generate_with_tool_calls", hooks.CustomGenerate),
        ("search.generate", hooks.CustomGenerate),
        ("reward.judge", hooks.CustomReward),
        ("filters.between", hooks.DynamicSamplingFilter),
        ("filters.fresh_first", hooks.BufferFilter),
        ("filters.without_repetition", hooks.SampleFilter),
    ],
)
def test_every_example_keeps_its_contract(path, contract):
    hooks.resolve(f"examples.{path}", contract)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 12+30=", "42\n"),
        ("2*(3-1)/4=", "1\n"),
        ("-0.1-0.2=", "-0.3\n"),
        ("12345*6789=", "83810205\n"),
        ("x=", "?\n"),
        ("1/0=", "?\n"),
        ("9**9=", "?\n"),
        ("()=", "?\n"),
        ("=", "?\n"),
        ("1" * 300 + "=", "?\n"),
        ("(" * 190 + "=", "?\n"),
    ],
)
def test_calculator_is_exact_and_never_fails(text, value):
    assert asyncio.run(calculator.answer(text)) == value


class Script:
    """An engine that returns the given texts, one per request, and records the requests."""

    def __init__(self, tokenizer, *replies):
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self.asked = []

    async def generate(self, input_ids, sampling_params, session_id=None):
        self.asked.append((self._tokenizer.decode(input_ids), sampling_params["max_new_tokens"], session_id))
        text, reason = self._replies.pop(0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Generation(ids, [-0.5] * len(ids), reason, "4")


def pending(tokenizer, prompt):
    return Sample(prompt=prompt, index=3, tokens=tokenizer(prompt, add_special_tokens=False)["input_ids"])


def params(limit):
    return {
        "max_new_tokens": limit,
        "stop": None,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def trained_text(tokenizer, sample):
    response = sample.tokens[sample.prompt_length :]
    return tokenizer.decode([token for token, mask in zip(response, sample.loss_mask, strict=True) if mask])


def test_model_and_calculator_alternate_and_only_model_tokens_are_trained(tokenizer):
    engine = Script(tokenizer, ("12+30=", "stop"), ("and 42*2=", "stop"), ("done", "stop"))
    sample = pending(tokenizer, "Add! ")
    made = asyncio.run(calculator.generate(None, sample, params(60), engine=engine, tokenizer=tokenizer))
    assert made.response == "12+30=42\nand 42*2=84\ndone"
    assert made.status is SampleStatus.COMPLETED
    assert trained_text(tokenizer, made) == "12+30=and 42*2=done"
    assert [p for p, m in zip(made.rollout_log_probs, made.loss_mask, strict=True) if not m] == [0.0] * 6
    assert engine.asked == [
        ("Add! ", 60, "calculator-3"),
        ("Add! 12+30=42\n", 51, "calculator-3"),
        ("Add! 12+30=42\nand 42*2=84\n", 39, "calculator-3"),
    ]
    assert made.weight_versions == ["4", "4", "4"] and made.metadata["turn_starts"] == [0, 9, 21]


def call_of(arguments, name="calculate"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (call_of('{"expression": "2*(3-1)/4"}'), "1"),
        ("<tool_call>{</tool_call> again: " + call_of('{"expression": "12+30"}'), "42"),
        (call_of('{"expression": "1/0"}'), "error: ZeroDivisionError"),
        (call_of('{"expression": 12}'), "error: TypeError"),
        (call_of("[]"), "error: TypeError"),
        (call_of('{"code": "1"}'), "error: KeyError"),
        (call_of('{"expression": "12345*6789"}'), "83810205"),
        (call_of('{"expression": "1/3"}'), "0.333333333333333"),
        (call_of("[" * 9000), "error: RecursionError"),
        (call_of("{}", name="<|im_end|>" * 99), "error: there is no such tool"),
        ("<tool_call>12</tool_call>", "error: TypeError"),
        ("<tool_call>[1</tool_call>", "error: JSONDecodeError"),
        ("</tool_call>", "error: JSONDecodeError"),
    ],
)
def test_tool_call_has_its_value_or_its_error(text, value):
    assert calculator.result(text) == value


def test_chat_model_calls_its_tool_and_reads_the_result_in_a_turn_of_the_user(tokenizer):
    call, prompt = call_of('{"expression": "12+30"}'), "<|im_start|>user\nAdd!<|im_end|>\n<|im_start|>assistant\n"
    engine = Script(tokenizer, (call, "stop"), ("42", "stop"))
    made = asyncio.run(
        calculator.generate_with_tool_calls(
            None, pending(tokenizer, prompt), params(400), engine=engine, tokenizer=tokenizer
        )
    )
    turn = "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert made.response == call + turn + "42" and made.status is SampleStatus.COMPLETED
    assert trained_text(tokenizer, made) == call + "42"
    assert [asked[0] for asked in engine.asked] == [prompt, prompt + call + turn]


def test_interrupted_conversation_resumes_within_its_turn(tokenizer):
    sample = pending(tokenizer, "Add! ")
    engine = Script(tokenizer, ("12+", "abort"))
    made = asyncio.run(calculator.generate(None, sample, params(60), engine=engine, tokenizer=tokenizer))
    assert made.status is SampleStatus.ABORTED and made.response == "12+"
    engine = Script(tokenizer, ("30=", "stop"), ("!", "stop"))
    made = asyncio.run(calculator.generate(None, made, params(57), engine=engine, tokenizer=tokenizer))
    assert made.status is SampleStatus.COMPLETED and made.response == "12+30=42\n!"
    assert trained_text(tokenizer, made) == "12+30=!"


def test_conversation_ends_when_the_sample_is_full(tokenizer):
    for limit, response in ((7, "12+30=4"), (6, "12+30="), (9, "12+30=42\n")):
        engine = Script(tokenizer, ("12+30=", "stop"))
        sample = pending(tokenizer, "Add! ")
        made = asyncio.run(calculator.generate(None, sample, params(limit), engine=engine, tokenizer=tokenizer))
        assert made.response == response and made.status is SampleStatus.TRUNCATED
    replies = [("1+1=", "stop")] * (calculator.MAX_CALLS + 1)
    sample = pending(tokenizer, "Add! ")
    made = asyncio.run(
        calculator.generate(None, sample, params(99), engine=Script(tokenizer, *replies), tokenizer=tokenizer)
    )
    assert made.status is SampleStatus.TRUNCATED and made.response == "1+1=2\n" * calculator.MAX_CALLS + "1+1="


@pytest.fixture
def index(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = ["Oslo is the capital of Norway.", "Rome is the capital of Italy.", "Bread is made of flour."]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert search.build(corpus, tmp_path / "index.sqlite") == 3
    return tmp_path / "index.sqlite"


def test_best_passage_comes_first_and_any_text_is_a_valid_query(index):
    assert search.search(index, "what is the capital of Norway?", 2)[0] == "Oslo is the capital of Norway."
    assert search.search(index, "flour") == ["Bread is made of flour."]
    assert search.search(index, '" OR (') == [] and search.search(index, "zebra") == []
    with pytest.raises(FileExistsError, match="already exists: give another path"):
        search.build(index, index)


def test_model_receives_the_search_results(index, tokenizer, make_args):
    args = make_args(custom={"search_index": str(index)})
    engine = Script(tokenizer, ("<search>Norway</search>", "stop"), ("Oslo", "stop"))
    sample = pending(tokenizer, "Capital of Norway?")
    made = asyncio.run(search.generate(args, sample, params(200), engine=engine, tokenizer=tokenizer))
    passage = "<information>Oslo is the capital of Norway.</information>"
    assert made.response == f"<search>Norway</search>{passage}Oslo"
    assert trained_text(tokenizer, made) == "<search>Norway</search>Oslo"


def scored(reward, number=0, **changes):
    return Sample(prompt="q", index=number, tokens=[1] * 81, reward=reward, status=SampleStatus.COMPLETED, **changes)


@pytest.mark.parametrize(("length", "label", "score"), [(20, "2", 1.0), (60, "2", 0.75), (80, "2", 0.5), (20, "3", 0)])
def test_reward_is_reduced_by_length(make_args, length, label, score):
    args = make_args(rollout_max_response_len=80)
    sample = scored(None, response="\\boxed{2}", response_length=length, label=label)
    assert asyncio.run(reward.judge(args, sample))["score"] == pytest.approx(score)


def test_filters_keep_the_documented_groups(make_args):
    outputs = [filters.between(make_args(), [scored(float(r)) for r in rs]) for rs in ([0, 0], [1, 0], [1, 1])]
    assert [(output.keep, output.reason) for output in outputs] == [
        (False, "too_hard"),
        (True, None),
        (False, "too_easy"),
    ]
    waiting = [[scored(0.0, number, metadata={"start_rollout_id": start})] for number, start in enumerate((1, 3, 2))]
    assert [group[0].index for group in filters.fresh_first(None, 4, waiting, 2)] == [1, 2] and len(waiting) == 1
    groups = [[scored(0.0, response="so it is"), scored(0.0, response="wait, " * 500)]]
    filters.without_repetition(None, groups)
    assert [sample.remove_sample for sample in groups[0]] == [False, True]
