"""Several teachers on servers, of which each prompt has one, and the top tokens of a teacher's distributions."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import torch

from slimrl.cluster.launch import with_key
from slimrl.data.sample import PackedColumn, Sample
from slimrl.data.train_batch import RolloutBatch, batch_from_samples
from slimrl.rollout.convert_samples import Rewards, training_batch
from slimrl.rollout.dataset.dataset_mixture import DatasetMixture
from slimrl.rollout.metrics import teacher_metrics
from slimrl.rollout.rm_hub import RewardScorer
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.remote import RemoteUnreachable
from slimrl.rollout.rm_hub.teacher import Reply, TeacherError, top_tokens_of
from tests.rollout.test_teacher import ONES, FakeTeacher, filled, sample, scored, top_at


def test_each_sample_is_sent_to_the_teacher_that_its_metadata_names(make_args):
    math, first, second = FakeTeacher(), FakeTeacher(), FakeTeacher()

    async def main() -> list[Sample]:
        async with math, first, second:
            urls = [f"math={math.url}", f"code={first.url}/generate,{second.url}"]
            args = dataclasses.replace(make_args(), use_opd=True, opd_type="sglang", opd_teacher_urls=urls)
            scorer = RewardScorer.from_args(args, graders=GraderPool(time_limit_s=5.0, size=1))
            samples = [sample(index, prompt=2 + index) for index in range(5)]
            for one, name in zip(samples, ("math", "code", "code", "math", "code"), strict=True):
                one.metadata["teacher"] = name
            stray = sample(9)
            try:
                await asyncio.gather(*(scorer.score_tokens(one) for one in samples))
                with pytest.raises(
                    TeacherError, match=r"sample 9 has metadata.teacher None, and the teachers are math, code"
                ):
                    await scorer.score_tokens(stray)
                stray.metadata["teacher"] = "physics"
                with pytest.raises(TeacherError, match="sample 9 has metadata.teacher 'physics'"):
                    await scorer.score_tokens(stray)
            finally:
                scorer.close()
            return samples

    samples = asyncio.run(main())
    assert [len(body["input_ids"]) for body in math.asked] == [6, 9]
    assert sorted(len(body["input_ids"]) for body in first.asked + second.asked) == [7, 8, 10]
    assert first.asked and second.asked
    assert all(len(one.teacher_log_probs or []) == 4 for one in samples)


def test_failure_of_one_of_several_teachers_names_it(make_args, monkeypatch):
    monkeypatch.setattr("slimrl.rollout.rm_hub.remote.ATTEMPTS", 1)
    broken = FakeTeacher(status=503)

    async def main() -> None:
        async with broken:
            urls = [f"math={broken.url}"]
            args = dataclasses.replace(make_args(), use_opd=True, opd_type="sglang", opd_teacher_urls=urls)
            scorer = RewardScorer.from_args(args, graders=GraderPool(time_limit_s=5.0, size=1))
            one = sample()
            one.metadata["teacher"] = "math"
            try:
                await scorer.score_tokens(one)
            finally:
                scorer.close()

    with pytest.raises(RemoteUnreachable, match=r"the teacher math's server http://\S+"):
        asyncio.run(main())


def test_key_of_the_run_is_not_sent_to_external_teachers(make_args):
    args = dataclasses.replace(make_args(), use_opd=True, opd_type="sglang", opd_teacher_urls=["a=http://h:1"])
    assert "api_key" not in with_key(args).rm_server_options
    assert "api_key" in with_key(make_args()).rm_server_options


def test_prompt_has_the_teacher_of_its_row_or_of_its_file_or_the_default(make_args, tmp_path, tokenizer):
    rows = {
        "math": [{"input": "1"}, {"input": "2", "metadata": {"expert": "code", "level": 3}}],
        "other": [{"input": "3"}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [str(tmp_path / f"{name}.jsonl") for name in rows]
    urls = ["math=http://h:1", "code=http://h:2", "default=http://h:3"]
    flags = {"use_opd": True, "opd_type": "sglang", "opd_teacher_urls": urls, "opd_teacher_key": "expert"}
    args = dataclasses.replace(make_args(), **flags, prompt_data=paths, input_key="input", label_key=None)
    prompts = DatasetMixture(args, tokenizer).draw(3)
    assert {prompt.content: prompt.metadata for prompt in prompts} == {
        "1": {"expert": "math"},
        "2": {"expert": "code", "level": 3},
        "3": {"expert": "default"},
    }
    without = dataclasses.replace(args, opd_teacher_urls=urls[:2])
    with pytest.raises(ValueError, match=r"other.jsonl:1: no metadata.expert .* neither 'other', the name of the file"):
        DatasetMixture(without, tokenizer).draw(3)
    unknown = dataclasses.replace(args, opd_teacher_urls=[urls[0], urls[2]])
    with pytest.raises(ValueError, match=r"math.jsonl:2: metadata.expert .* is 'code' and --opd-teacher-urls has math"):
        DatasetMixture(unknown, tokenizer).draw(3)


# top tokens -----------------------------------------------------------------------------------------------------------


def test_top_tokens_of_every_response_token_reach_the_batch_in_order(tmp_path):
    server = FakeTeacher()
    one, empty, long = filled([sample(), sample(1, response=0), sample(2, response=6)], server, top=2)
    assert [body["top_logprobs_num"] for body in server.asked] == [2, 2]
    assert isinstance(one.column("teacher_top_ids"), PackedColumn)
    batch = batch_from_samples([one, empty, long], torch.ones(3), torch.ones(3))
    places = [*range(3, 7), *range(3, 9)]
    ids = [[entry[1] for entry in top_at(place, 2)] for place in places]
    assert batch.teacher_top_ids is not None and batch.teacher_top_ids.tolist() == ids
    assert batch.teacher_top_log_probs is not None
    assert batch.teacher_top_log_probs.tolist() == [[entry[0] for entry in top_at(place, 2)] for place in places]
    chosen = batch.select([2, 0])
    assert chosen.teacher_top_ids is not None and chosen.teacher_top_ids.tolist() == ids[4:] + ids[:4]
    batch.save(tmp_path / "batch")
    loaded = RolloutBatch.load(tmp_path / "batch").teacher_top_ids
    assert loaded is not None and torch.equal(loaded, batch.teacher_top_ids)


def test_samples_with_other_numbers_of_top_tokens_are_an_error():
    one, two = filled([sample()], FakeTeacher(), top=2) + filled([sample(1)], FakeTeacher(), top=3)
    with pytest.raises(ValueError, match="different numbers of teacher_top_ids per response token"):
        batch_from_samples([one, two], ONES, ONES)
    (without,) = filled([sample(2)], FakeTeacher())
    with pytest.raises(ValueError, match="different numbers of teacher_top_ids per response token"):
        batch_from_samples([one, without], ONES, ONES)


def test_training_on_a_divergence_needs_the_top_tokens(make_args):
    args, rewards = make_args(), Rewards(ONES, ONES)
    args = dataclasses.replace(args, use_opd=True, opd_type="sglang", opd_divergence="forward_kl")
    samples = filled([sample(), sample(1)], FakeTeacher(), top=2)
    assert training_batch(args, samples, rewards, hook_args=args).teacher_top_ids is not None
    with pytest.raises(ValueError, match="no sample has teacher_top_ids and teacher_top_log_probs, which --opd-div"):
        training_batch(args, scored([-0.1] * 4, [-0.2] * 4, response=4), rewards, hook_args=args)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"meta_info": {}}', "returned no top_logprobs of its input (KeyError)"),
        (b'{"meta_info": {"input_top_logprobs": [null, [[-1.0, 5, null]]]}}', "returned no top_logprobs of its input"),
        (
            b'{"meta_info": {"input_top_logprobs": [[[-1.0, 5, null]]]}}',
            "did not return 2 different tokens at each of 2",
        ),
        (
            b'{"meta_info": {"input_top_logprobs": [[[-1, 5, null], [-2, 5, null]], [[-1, 5, null], [-2, 6, null]]]}}',
            "did not return 2 different tokens at each of 2 places: lower --opd-top-k",
        ),
    ],
)
def test_unusable_top_tokens_are_an_error_that_names_the_server(reply: bytes, message: str):
    with pytest.raises(TeacherError) as error:
        top_tokens_of(Reply(reply), "http://h:1", 2, 2)
    assert message in str(error.value) and "the teacher's server http://h:1" in str(error.value)


# metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_have_the_samples_and_the_sampled_reverse_kl_of_each_teacher():
    samples = [sample(index) for index in range(4)]
    for one, name in zip(samples, ("math", "code", "math", "math"), strict=True):
        one.metadata["teacher"] = name
        one.rollout_log_probs, one.teacher_log_probs = [-1.0, -2.0, -3.0, -4.0], [-1.5, -2.0, -2.0, -6.0]
    samples[2].loss_mask = [1, 1, 0, 0]
    samples[1].pack(
        "teacher_log_probs", PackedColumn(torch.tensor([-1.5, -2.0, -2.0, -6.0]).double().numpy().tobytes(), "f8")
    )
    samples[3].remove_sample = True
    metrics = teacher_metrics(samples, "teacher")
    assert metrics == {
        "rollout/teacher/math/samples": 3.0,
        "rollout/teacher/code/samples": 1.0,
        "rollout/teacher/math/opd_reverse_kl": pytest.approx(((0.5 + 0 - 1 + 2) / 4 + 0.25) / 2),
        "rollout/teacher/code/opd_reverse_kl": pytest.approx((0.5 + 0 - 1 + 2) / 4),
    }
