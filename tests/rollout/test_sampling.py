"""The content of engine requests, and seeds that depend only on the sample."""

import random

from slimrl.data.sample import Sample
from slimrl.engines.protocol import SamplingConfig, sampling_seed

DETERMINISTIC = {"sglang_options": {"enable_deterministic_inference": True}}


def sample_of(prompt_tokens=3, response_tokens=0):
    return Sample(
        prompt="q", index=5, tokens=list(range(prompt_tokens + response_tokens)), response_length=response_tokens
    )


def test_training_request_has_every_rollout_flag(make_args):
    args = make_args(
        rollout_temperature=0.8,
        rollout_top_p=0.9,
        rollout_top_k=20,
        rollout_max_response_len=100,
        rollout_stop=["END"],
        rollout_stop_token_ids=[7],
        rollout_skip_special_tokens=True,
    )
    assert SamplingConfig.for_training(args).params(sample_of(), 5) == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 100,
        "stop": ["END"],
        "stop_token_ids": [7],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_evaluation_request_has_the_values_of_its_dataset(make_args, make_eval_dataset):
    dataset = make_eval_dataset(temperature=0.0, top_p=0.7, top_k=3, max_response_len=9, min_new_tokens=2)
    params = SamplingConfig.for_evaluation(make_args(), dataset).params(sample_of(), 0, 0)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 0.7, 3)
    assert (params["max_new_tokens"], params["min_new_tokens"]) == (9, 2)
    assert "sampling_seed" not in params and "repetition_penalty" not in params and params["no_stop_trim"] is True
    dataset = make_eval_dataset(repetition_penalty=1.1, no_stop_trim=False)
    params = SamplingConfig.for_evaluation(make_args(), dataset).params(sample_of(), 0, 0)
    assert (params["repetition_penalty"], params["no_stop_trim"]) == (1.1, False)


def test_budget_is_the_remaining_context_including_existing_tokens(make_args):
    plan = SamplingConfig.for_training(make_args(rollout_max_response_len=10, rollout_max_context_len=12))
    assert plan.params(sample_of(prompt_tokens=1))["max_new_tokens"] == 10
    assert plan.params(sample_of(prompt_tokens=8))["max_new_tokens"] == 4
    assert plan.params(sample_of(prompt_tokens=8, response_tokens=3))["max_new_tokens"] == 1


def test_budget_is_limited_by_the_engine_context(make_args, make_eval_dataset):
    args = make_args(rollout_max_response_len=10, rollout_max_context_len=14, engine_context_len=12)
    dataset = make_eval_dataset(max_response_len=10, max_context_len=None)
    for plan in (SamplingConfig.for_training(args), SamplingConfig.for_evaluation(args, dataset)):
        assert plan.params(sample_of(prompt_tokens=1), 0)["max_new_tokens"] == 10
        assert plan.params(sample_of(prompt_tokens=8), 0)["max_new_tokens"] == 4
        assert plan.params(sample_of(prompt_tokens=8, response_tokens=4), 0)["max_new_tokens"] == 0


def test_seed_is_sent_only_to_deterministic_engines(make_args):
    assert "sampling_seed" not in SamplingConfig.for_training(make_args()).params(sample_of(), 5)
    params = SamplingConfig.for_training(make_args(**DETERMINISTIC)).params(sample_of(), 5)
    assert params["sampling_seed"] == sampling_seed(42, 5)


def test_external_servers_always_get_a_seed_as_any_may_be_deterministic(make_args, make_eval_dataset):
    args = make_args(rollout_external_engine_addrs=["10.0.0.1:30000", "10.0.0.2:30000"])
    plan = SamplingConfig.for_training(args)
    assert [plan.params(sample_of(), index)["sampling_seed"] for index in (5, 6)] == [
        sampling_seed(42, 5),
        sampling_seed(42, 6),
    ]
    evaluation = SamplingConfig.for_evaluation(args, make_eval_dataset(name="sums"))
    assert evaluation.params(sample_of(), 0, 1)["sampling_seed"] == sampling_seed(42, "eval", "sums", 0, 1)


def test_seeds_are_stable_across_versions_processes_and_orders():
    # fixed: a changed hash would break the resume of every existing run
    assert [sampling_seed(42, index) for index in range(3)] == [1295844956, 424868566, 1993575685]
    indices = list(range(1000))
    random.Random(0).shuffle(indices)
    assert {i: sampling_seed(1, i) for i in indices} == {i: sampling_seed(1, i) for i in range(1000)}


def test_seeds_are_31_bit_and_distinct(make_args, make_eval_dataset):
    seeds = [sampling_seed(42, index) for index in range(20_000)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > 19_990  # 20 000 of 2^31: less than one clash expected in ten
    plans = [
        SamplingConfig.for_evaluation(make_args(**DETERMINISTIC), make_eval_dataset(name=name)) for name in ("a", "b")
    ]
    plans.append(SamplingConfig.for_training(make_args(**DETERMINISTIC)))
    seeds = [
        plan.params(sample_of(), row, repeat)["sampling_seed"]
        for plan in plans
        for row, repeat in [(0, 0), (0, 1), (1, 0), (1, 10), (11, 0)]
    ]
    assert len(set(seeds)) == len(seeds)
