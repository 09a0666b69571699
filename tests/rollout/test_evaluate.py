"""Evaluation with hand-computed numbers."""

import asyncio

import pytest

from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rollout_generator import RolloutGenerator


@pytest.fixture
def evaluate(make_args, tokenizer, fake_engine):
    def run(datasets, engine=None, **overrides):
        engine = engine or fake_engine()

        async def main():
            generator = RolloutGenerator.from_args(make_args(eval_datasets=datasets, **overrides), tokenizer, engine)
            try:
                results = await generator.evaluate(0)
                return results, generator.progress()
            finally:
                generator.close()
                assert len(asyncio.all_tasks()) == 1

        results, progress = asyncio.run(main())
        return results, progress, engine

    return run


def test_greedy_evaluation_gives_the_hand_computed_accuracy(evaluate, make_eval_dataset, fake_engine):
    # 12 rows, one sample each; the sums of 0..7 are correct, 8 and 9 wrong, 10 and 11 hit the limit of 10 tokens
    def reply(prompt, call):
        number = int(prompt.split("+")[0])
        if number >= 10:
            return "I think and think"
        return f"\\boxed{{{2 * number}}}" if number < 8 else "\\boxed{1}"

    results, progress, engine = evaluate([make_eval_dataset(max_response_len=10)], fake_engine(reply))
    result = results["sums"]
    assert all(params["temperature"] == 0.0 for _, params in engine.requests)
    assert result.mean_reward == pytest.approx(8 / 12)
    assert result.pass_rate == pytest.approx(8 / 12)
    assert result.truncated_ratio == pytest.approx(2 / 12)
    # tokens are bytes: "\boxed{d}" has 9, "\boxed{dd}" 10 (rows 5 to 7), the truncated ones 10
    assert result.metrics() == pytest.approx(
        {
            "eval/sums": 8 / 12,
            "eval/sums-truncated_ratio": 2 / 12,
            "eval/sums-reward_failures": 0.0,
            "eval/sums-pass@1": 8 / 12,
            "eval/sums/response_len/mean": (7 * 9 + 5 * 10) / 12,
            "eval/sums/response_len/median": 9.0,
            "eval/sums/response_len/max": 10.0,
            "eval/sums/response_len/min": 9.0,
        }
    )
    assert [sample.prompt for sample in result.samples] == [f"{i}+{i}=" for i in range(12)]
    assert progress == (12, 12)


def test_pass_at_k_is_the_probability_over_samples(evaluate, make_eval_dataset, fake_engine, sums):
    # one row, four samples of which one is correct: pass@1 = 1/4, pass@2 = 1 - C(3,2)/C(4,2) = 1/2, pass@4 = 1
    engine = fake_engine(lambda prompt, call: "\\boxed{0}" if call == 2 else "\\boxed{9}")
    dataset = make_eval_dataset(path=f"{sums}@[:1]", n_samples_per_eval_prompt=4, temperature=1.0)
    result = evaluate([dataset], engine)[0]["sums"]
    metrics = result.metrics()
    assert [metrics[f"eval/sums-pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])
    assert result.mean_reward == 0.25 and result.pass_rate == 1.0


def test_repeats_are_adjacent_and_pass_rates_are_per_prompt():
    result = EvalResult("a", [1.0, 0.0, 0.0, 0.0, 0.5, 0.99], [], 2)
    assert result.pass_rate == pytest.approx(1 / 3)
    assert result.mean_reward == pytest.approx(2.49 / 6)


def test_several_datasets_keep_their_own_settings(evaluate, make_eval_dataset, sums, write_rows):
    other = write_rows([{"question": "20+1=", "answer": 21}], "other.jsonl")
    datasets = [
        make_eval_dataset(path=f"{sums}@[:2]"),
        make_eval_dataset(
            name="other",
            path=other,
            input_key="question",
            label_key="answer",
            temperature=0.7,
            n_samples_per_eval_prompt=3,
            metadata_overrides={"rm_type": "deepscaler"},
        ),
    ]
    results, progress, engine = evaluate(datasets)
    assert list(results) == ["sums", "other"] and progress == (5, 5)
    assert results["sums"].mean_reward == 1.0
    assert results["other"].mean_reward == 0.0  # deepscaler expects the end of the thinking first
    assert sorted(params["temperature"] for _, params in engine.requests) == [0.0, 0.0, 0.7, 0.7, 0.7]


def test_evaluation_seeds_do_not_depend_on_other_datasets(evaluate, make_eval_dataset):
    flags = {"sglang_options": {"enable_deterministic_inference": True}}
    alone = evaluate([make_eval_dataset()], **flags)[2]
    beside = evaluate([make_eval_dataset(name="first"), make_eval_dataset()], **flags)[2]
    seeds = [{params["sampling_seed"] for _, params in engine.requests} for engine in (alone, beside)]
    assert len(seeds[0]) == 12 and len(seeds[1]) == 24 and seeds[0] < seeds[1]


def test_invalid_eval_file_or_reward_is_rejected_before_generation(evaluate, make_eval_dataset, write_rows):
    bad = write_rows([{"prompt": "no label"}], "bad.jsonl")
    with pytest.raises(ValueError, match="bad.jsonl"):
        evaluate([make_eval_dataset(path=bad)])
    with pytest.raises(ValueError, match="evaluation set 'sums': the reward type 'maths' is unknown"):
        evaluate([make_eval_dataset(rm_type="maths")])


def test_failure_names_the_sample(evaluate, make_eval_dataset, fake_engine):
    def reply(prompt, call):
        raise OSError("no route")

    with pytest.raises(SampleError, match=r"generation of sample \d+ \(group \d+\) failed: OSError: no route"):
        evaluate([make_eval_dataset()], fake_engine(reply))


@pytest.mark.parametrize("skips", [True, False])
def test_failing_function_is_not_skipped_in_evaluation_and_the_message_says_so(
    evaluate, make_eval_dataset, tmp_path, monkeypatch, skips
):
    (tmp_path / "failing_judge.py").write_text("async def judge(args, sample):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    datasets = [make_eval_dataset(), make_eval_dataset(name="hard", custom_rm_path="failing_judge.judge")]
    with pytest.raises(SampleError) as caught:
        evaluate(datasets, skip_failed_samples=skips)
    text = str(caught.value)
    assert text.startswith("evaluation set 'hard': the reward of sample ")
    said = "--skip-failed-samples does not apply to evaluations, because skipping would change the result"
    assert (text.splitlines()[-1] == f"{said}: fix the function") is skips


def test_dict_rewards_need_a_key(evaluate, make_eval_dataset, tmp_path, monkeypatch):
    (tmp_path / "eval_hooks.py").write_text("async def judge(args, sample):\n    return {'score': 0.25, 'acc': 1}\n")
    monkeypatch.syspath_prepend(tmp_path)
    dataset = make_eval_dataset(custom_rm_path="eval_hooks.judge", reward_key="score")
    assert evaluate([dataset])[0]["sums"].mean_reward == 0.25
    with pytest.raises(ValueError, match="the reward is a dict with keys"):
        evaluate([make_eval_dataset(custom_rm_path="eval_hooks.judge")])


def test_custom_rollout_function_also_evaluates(evaluate, make_eval_dataset, tmp_path, monkeypatch):
    (tmp_path / "whole_hooks.py").write_text(
        "from slimrl.rollout.sglang_rollout import generate_rollout\n"
        "def built_in(args, rollout_id, data_source, *, evaluation, generator=None):\n"
        "    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation, generator=generator)\n"
        "def own(args, rollout_id, data_source, *, evaluation):\n"
        "    return {'mine': {'rewards': [1.0, 0.0], 'samples': []}}\n"
        "def nothing(args, rollout_id, data_source, *, evaluation):\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    built_in = evaluate([make_eval_dataset()], rollout_function_path="whole_hooks.built_in")[0]
    assert built_in["sums"].mean_reward == 1.0
    own = evaluate([make_eval_dataset()], rollout_function_path="whole_hooks.own")[0]
    assert own["mine"].mean_reward == 0.5
    with pytest.raises(TypeError, match="whole_hooks.nothing returned NoneType with evaluation=True"):
        evaluate([make_eval_dataset()], rollout_function_path="whole_hooks.nothing")
