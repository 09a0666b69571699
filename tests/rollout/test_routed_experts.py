"""The engine's experts of a sample: from its answer to the batch, over continued responses, dumps and checkpoints."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from slimrl.data.routed_experts import RoutingShape, continued
from slimrl.data.sample import Sample
from slimrl.data.train_batch import RolloutBatch, batch_from_samples
from slimrl.rollout.convert_samples import Rewards, training_batch

SHAPE = RoutingShape(layers=2, topk=2, experts=8)


def answer(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(np.int32).tobytes()).decode()


def rows(*numbers: int) -> np.ndarray:
    """One row per number, in which every layer and expert has it."""
    return np.repeat(np.array(numbers, np.int16), 4).reshape(-1, 2, 2)


def test_answer_of_an_engine_is_read():
    values = np.arange(8).reshape(2, 2, 2)
    found = SHAPE.decoded(answer(values))
    assert found.dtype == np.int16 and found.tolist() == values.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no base64", "not base64 of int32 numbers"),
        (base64.b64encode(b"abc").decode(), "not base64 of int32 numbers"),
        (answer(np.zeros(6)), "6 numbers, which are no whole tokens of 2 layers with 2 experts each"),
        (answer(np.full(4, 8)), "are 8 to 8: the model has experts 0 to 7"),
        (answer(np.full(4, -2)), "are -2 to -2"),
    ],
)
def test_unusable_answer_is_named(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        SHAPE.decoded(text)


def test_rows_of_earlier_requests_stay_and_new_tokens_follow():
    first = continued(None, 3, rows(1, 1, 1, 1))  # a prompt of 3 tokens and 2 new ones: 4 rows
    assert first.tolist() == rows(1, 1, 1, 1).tolist()
    second = continued(first, 7, rows(*[2] * 8))  # a tool appended 2 tokens; 2 new ones
    assert second.tolist() == rows(1, 1, 1, 1, 2, 2, 2, 2).tolist()
    cut = continued(second, 4, rows(*[3] * 5))  # a stop string cut the sample to 4 tokens
    assert cut.tolist() == rows(1, 1, 1, 3, 3).tolist()


def sample(index: int, tokens: int, routes: np.ndarray | None) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        tokens=list(range(tokens)),
        response_length=tokens - 1,
        rollout_log_probs=[-1.0] * (tokens - 1),
        rollout_routed_experts=routes,
    )


def batch_of(samples: list[Sample]) -> RolloutBatch:
    rewards = torch.zeros(len(samples))
    return batch_from_samples(samples, rewards, rewards, routing=SHAPE)


def test_batch_has_a_row_per_token_and_selection_and_file_keep_it(tmp_path):
    batch = batch_of([sample(0, 3, rows(1, 2)), sample(1, 2, None), sample(2, 4, rows(3, 4, 5, 6, 7))])
    assert batch.routed_experts is not None
    assert batch.routed_experts[:, 1, 0].tolist() == [1, 2, -1, -1, -1, 3, 4, 5, -1]
    chosen = batch.select([2, 0])
    assert chosen.routed_experts[:, 0, 1].tolist() == [3, 4, 5, -1, 1, 2, -1]
    chosen.save(tmp_path / "batch")
    assert RolloutBatch.load(tmp_path / "batch").routed_experts.equal(chosen.routed_experts)
    rewards = torch.zeros(1)
    assert batch_from_samples([sample(0, 3, rows(1, 2))], rewards, rewards).routed_experts is None


def test_experts_of_another_model_are_named_with_the_sample():
    with pytest.raises(ValueError, match=r"sample 7 .*shape \[2, 3, 2\].*give \[tokens - 1, 2, 2\]"):
        batch_of([sample(7, 3, np.zeros((2, 3, 2), np.int16))])


def test_experts_that_no_router_follows_are_refused(make_args):
    args, none = make_args(), Rewards(torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="sample 3 has rollout_routed_experts, which only --use-rollout-routing-repl"):
        training_batch(args, [sample(3, 3, rows(1, 2))], none, hook_args=args)


def test_sample_with_experts_is_plain_data_and_back():
    one = sample(0, 3, rows(1, 2))
    again = Sample.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one and again.rollout_routed_experts.tolist() == rows(1, 2).tolist()
    assert again.rollout_routed_experts.dtype == np.int16
    assert Sample.from_dict(sample(0, 3, None).to_dict()).rollout_routed_experts is None
