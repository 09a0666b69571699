"""Full rollouts with `--group-rm`: one call per group, and in an evaluation one per sample."""

import asyncio
import sys

import pytest

from slimrl.data.sample import SampleStatus
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.rollout_generator import RolloutGenerator

HOOKS = """
calls = []

async def rank(args, samples):
    assert all(sample.response and sample.reward is None for sample in samples)
    calls.append([sample.index for sample in samples])
    return [float(place) for place, _ in enumerate(samples)]

async def broken(args, samples):
    raise KeyError("score")
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "group_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "group_hooks"
    sys.modules.pop("group_hooks", None)


@pytest.fixture
def run(make_args, tokenizer, fake_engine):
    """Calls `work(generator, data source)` on a generator with these arguments."""

    def call(work, **overrides):
        args = make_args(group_rm=True, n_samples_per_prompt=3, **overrides)
        engine = fake_engine(delay=lambda prompt, number: 0.01 * (number % 3))

        async def main():
            generator = RolloutGenerator.from_args(args, tokenizer, engine)
            try:
                return await work(generator, RolloutDataSource(args, tokenizer))
            finally:
                generator.close()

        return asyncio.run(main())

    return call


def test_each_group_is_scored_in_one_call_after_all_its_samples_are_generated(run, hooks):
    output = run(lambda generator, source: generator.generate_rollout(0, source), custom_rm_path=f"{hooks}.rank")
    assert [[sample.reward for sample in group] for group in output.groups] == [[0.0, 1.0, 2.0]] * 4
    assert all(sample.status is SampleStatus.COMPLETED for group in output.groups for sample in group)
    assert sorted(sys.modules[hooks].calls) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_built_in_rewards_support_groups(run):
    output = run(lambda generator, source: generator.generate_rollout(0, source))
    assert [[sample.reward for sample in group] for group in output.groups] == [[1.0] * 3] * 4


def test_evaluation_is_scored_per_sample(run, hooks, make_eval_dataset):
    path = f"{hooks}.rank"
    results = run(
        lambda generator, source: generator.evaluate(0),
        custom_rm_path=path,
        eval_datasets=(make_eval_dataset(custom_rm_path=path, rm_type=None),),
    )
    assert results["sums"].rewards == [0.0] * 12
    assert sorted(map(len, sys.modules[hooks].calls)) == [1] * 12


def test_failing_function_names_the_group(run, hooks):
    with pytest.raises(RuntimeError, match=r"the reward of the group of sample \d+ \(group \d\) failed: KeyError"):
        run(lambda generator, source: generator.generate_rollout(0, source), custom_rm_path=f"{hooks}.broken")
