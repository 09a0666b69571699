"""Checkpoint state of groups that are sampled and not trained: packed, serializable, and restored unchanged."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import enum
import io
from collections import Counter

import numpy as np
import pytest
import torch

from slimrl.data.sample import Sample, SampleStatus
from slimrl.megatron.checkpoint.folder import encode_data_state
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.generation import inflight_groups
from slimrl.rollout.generation.inflight_groups import FinishedGroup, InflightState, plain_data
from tests.rollout.async_helpers import HERE, async_generation
from tests.rollout.test_async_rollout import scripted


def through_a_checkpoint(state: dict) -> dict:
    return torch.load(io.BytesIO(encode_data_state(state)), weights_only=True)


def finished_sample(**changes) -> Sample:
    values = {
        "prompt": "1+1=",
        "group_index": 0,
        "index": 1,
        "tokens": [150_000, 3, 0, 2**31, 7],
        "response": "two",
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.1, -1e-300, -17.25],
        "version_spans": [["3", 2], ["", 1]],
        "reward": {"score": 0.5},
        "status": SampleStatus.COMPLETED,
        "metadata": {"level": 3, "words": ["a", ("b", None, True)]},
    }
    return Sample(**{**values, **changes})


def test_groups_round_trip_through_a_checkpoint(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    (unfinished,) = source.get_samples(1)
    ones = [
        finished_sample(teacher_log_probs=[-0.5, -2.0, -1e-9]),
        finished_sample(loss_mask=None, rollout_log_probs=None, tokens=[]),
    ]
    odd = finished_sample(loss_mask=[1.0, 0.0, 1.0], rollout_log_probs=[None, -1.0, -2.0])  # attached by a function
    state = InflightState([unfinished], [FinishedGroup([*ones, odd], unfinished, 3)]).added_to(source.state_dict())
    resumed = RolloutDataSource(make_args(), tokenizer)
    (found,) = inflight_groups.restore(resumed, through_a_checkpoint(state), keeps_finished=True)
    assert (found.group, found.prompts, found.oldest) == ([*ones, odd], unfinished, 3)
    assert resumed.get_samples(2) == [unfinished, *source.get_samples(1)]


def test_checkpoint_with_the_former_names_of_its_entries_is_resumed(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    (unfinished,) = source.get_samples(1)
    state = InflightState([unfinished], [FinishedGroup([finished_sample()], unfinished, 3)])
    state = state.added_to(source.state_dict())
    entry = state.pop("inflight_groups")
    (finished,) = entry["finished"]
    former = {"group": finished["group"], "drawn": finished["prompts"], "oldest": 3}
    resumed = RolloutDataSource(make_args(), tokenizer)
    state = {**state, "drawn": {"under_way": entry["unfinished"], "finished": [former]}}
    (found,) = inflight_groups.restore(resumed, through_a_checkpoint(state), keeps_finished=True)
    assert (found.group, found.prompts, found.oldest) == ([finished_sample()], unfinished, 3)
    assert resumed.get_samples(2) == [unfinished, *source.get_samples(1)]


def test_column_is_base64_of_eight_bytes_per_token_and_lists_are_also_read(make_args, tokenizer):
    source = RolloutDataSource(make_args(), tokenizer)
    state = InflightState([[finished_sample()]], []).added_to(source.state_dict())
    ((packed,),) = state["inflight_groups"]["unfinished"]
    assert np.frombuffer(base64.b64decode(packed["tokens"]), "<i8").tolist() == [150_000, 3, 0, 2**31, 7]
    assert np.frombuffer(base64.b64decode(packed["rollout_log_probs"]), "<f8").tolist() == [-0.1, -1e-300, -17.25]
    assert np.frombuffer(base64.b64decode(packed["loss_mask"]), "i1").tolist() == [1, 0, 1]
    older = {name: value for name, value in finished_sample().to_dict().items() if name != "teacher_log_probs"}
    state["inflight_groups"]["unfinished"] = [[older]]
    resumed = RolloutDataSource(make_args(), tokenizer)
    inflight_groups.restore(resumed, state, keeps_finished=True)
    assert resumed.get_samples(1) == [[finished_sample()]]


def test_attached_values_and_numpy_numbers_can_be_resumed(make_args, tokenizer, tmp_path):
    args = scripted(
        make_args,
        custom_rm_path=f"{HERE}.attaches",
        rollout_all_samples_process_path=None,
        save=str(tmp_path),
    )

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, _):
            generator.continuous.set_weight_version(0, 9)
            await generator.continuous.drain()
            return await generator.generate_rollout(0, source)

    output = asyncio.run(main())
    state = through_a_checkpoint(output.data_state)
    ones = inflight_groups.restore(RolloutDataSource(args, tokenizer), state, keeps_finished=True)
    assert len(ones) == 8
    for sample in (sample for one in ones for sample in one.group):
        assert sample.metadata == {"score": 0.5, "count": 3, "parts": (0.25, "a")}
        assert (type(sample.metadata["score"]), type(sample.reward)) == (float, float)


@pytest.mark.parametrize("saves", [True, False])
def test_unserializable_value_is_named_on_submission_when_the_run_saves(make_args, tokenizer, tmp_path, saves):
    args = scripted(
        make_args,
        custom_rm_path=f"{HERE}.leaves_an_object",
        rollout_all_samples_process_path=None,
        save=str(tmp_path) if saves else None,
    )

    async def main():
        async with async_generation(args, tokenizer) as (generator, source, _):
            generator.continuous.set_weight_version(0, 9)
            return await generator.generate_rollout(0, source, saved=False)

    if not saves:
        assert len(asyncio.run(main()).groups) == 4
        return
    sentence = (
        r"sample \d+: its metadata cannot be saved in a checkpoint: \['scores'\]\[1\]\['all'\] is of type numpy.ndarray"
    )
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(main())


class Level(enum.IntEnum):
    HARD = 3


class Name(enum.StrEnum):
    SUM = "sum"


@dataclasses.dataclass
class Score:
    right: bool


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Level.HARD, 3),
        (Name.SUM, "sum"),
        (np.bool_(True), True),
        (torch.tensor(2.5), 2.5),
        (Counter("aab"), {"a": 2, "b": 1}),
        ({Name.SUM: [Level.HARD]}, {"sum": [3]}),
        ((1, [2.5, None]), (1, [2.5, None])),
        (True, True),
        (2**70, 2**70),
    ],
)
def test_convertible_values_become_plain_data(value, plain):
    made = plain_data(value)
    assert made == plain and type(made) is type(plain)
    assert through_a_checkpoint({"value": made}) == {"value": plain}


def test_unconvertible_value_is_rejected_with_its_path():
    with pytest.raises(TypeError, match=r"^\['a'\]\[0\] is of type .*\.Score$"):
        plain_data({"a": [Score(True)]})
    with pytest.raises(TypeError, match=r"^it is of type builtins.set$"):
        plain_data({1})
