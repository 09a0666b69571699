"""A custom function that raises SystemExit, KeyboardInterrupt or similar is reported like any other error."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys

import pytest

from slimrl import hooks
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import HookFailedError
from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards, training_batch
from slimrl.rollout.dataset.data_source import GroupBuffer, RolloutDataSource, open_data_source
from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rollout_function import reported_metrics, reported_scalars
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.test_hooks import CONTRACTS, ROWS

EXITS = {
    "sys.exit(3)": "SystemExit: 3",
    "exit()": "SystemExit: None",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise asyncio.CancelledError": "CancelledError",
    "raise Own('gone')": "Own: gone",
}
SOURCE = """
import asyncio
import sys

class Own(BaseException):
    pass

def leave(*arguments, **keywords):
    {exit}

async def leave_async(*arguments, **keywords):
    await asyncio.sleep(0)
    {exit}

async def leave_in_a_task(*arguments, **keywords):
    await asyncio.create_task(leave_async())

async def leave_in_a_group(*arguments, **keywords):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(60))
        tasks.create_task(leave_async())

async def cancel_itself(*arguments, **keywords):
    asyncio.current_task().cancel()
    await asyncio.sleep(60)

async def cancel_itself_and_return(*arguments, **keywords):
    asyncio.current_task().cancel()
    return 1.0

async def first_leaves(args, sample, **keywords):
    if sample.index == 1:
        leave()
    return 1.0

ended = []

async def first_leaves_others_wait(args, sample, *arguments, **keywords):
    if sample.index == 1:
        await asyncio.sleep(0.05)
        leave()
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        ended.append(sample.index)
        raise asyncio.CancelledError from None

class Source:
    def __init__(self, args):
        pass

    def __len__(self):
        return 4

    def get_samples(self, num_groups):
        leave()

    def add_samples(self, groups):
        pass

    def state_dict(self):
        return {{}}

    def load_state_dict(self, state):
        pass
"""
LEAVES = SOURCE[: SOURCE.index("{exit}")].count("\n") + 1
LEAVES_ASYNC = SOURCE[: SOURCE.rindex("{exit}")].count("\n") + 1


@pytest.fixture(params=EXITS)
def leaving(request, tmp_path, monkeypatch):
    """The module with such functions, and the name of the exception."""
    yield from module_that(request.param, tmp_path, monkeypatch)


@pytest.fixture
def exiting(tmp_path, monkeypatch):
    yield from module_that("sys.exit(3)", tmp_path, monkeypatch)


def module_that(leave, tmp_path, monkeypatch):
    (tmp_path / "leaving_functions.py").write_text(SOURCE.format(exit=leave))
    monkeypatch.syspath_prepend(tmp_path)
    yield "leaving_functions", EXITS[leave]
    sys.modules.pop("leaving_functions", None)


def raised_by(work):
    """The exception of `work`; some of them would end pytest itself."""
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def roll(make_args, tokenizer, fake_engine):
    """A rollout of four groups of two samples, or `work` with the generator."""

    def run(work=None, contain=False, **changes):
        args = make_args(**changes)

        async def main():
            if contain:
                hooks.contain_tasks(asyncio.get_running_loop())
            generator = RolloutGenerator.from_args(args, tokenizer, fake_engine())
            source = open_data_source(args, tokenizer)
            try:
                doing = work(generator) if work else generator.generate_rollout(7, source)
                return await asyncio.wait_for(doing, 20)
            finally:
                left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                generator.close()
                assert not left, "tasks were left running"

        return asyncio.run(main())

    return run


def evaluation(generator):
    return generator.evaluate(3)


def waiting(args):
    buffer = GroupBuffer(args.buffer_filter_path, args)
    buffer.put([[Sample("1+1=")]])
    return buffer.take(1, 0)


def scored_samples(args):
    return [dataclasses.replace(Sample("1", 0, 0), tokens=[1, 2], response_length=1, reward=1.0)]


def metrics_reported(args):
    return reported_metrics(args, 0, scored_samples(args), {"rollout/raw_reward": 1.0}, {}, 1.0, hook_args=args)


def scalars_reported(args):
    return reported_scalars(args, 0, {"set": EvalResult("set", [1.0], scored_samples(args), 1)}, hook_args=args)


OF_SAMPLES = {  # by flag: the functions to try
    "custom_generate_function_path": ["leave_async", "leave_in_a_task"],
    "rollout_sample_hook_path": ["leave", "leave_async", "leave_in_a_task"],
    "custom_rm_path": ["leave_async", "leave_in_a_task"],
    "group_rm": ["leave_async", "leave_in_a_task"],
}
OF_ROLLOUTS = {  # by flag: the call, with a generator or with only the flags
    "rollout_function_path": None,
    "dynamic_sampling_filter_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "data_source_path": None,
    "eval_function_path": evaluation,
    "buffer_filter_path": waiting,
    "custom_reward_post_process_path": lambda args: compute_rewards(
        RewardProcessing.from_args(args), scored_samples(args)
    ),
    "custom_convert_samples_to_train_data_path": lambda args: training_batch(
        args, scored_samples(args), None, hook_args=args
    ),
    "custom_rollout_log_function_path": metrics_reported,
    "custom_eval_rollout_log_function_path": scalars_reported,
}


@pytest.mark.parametrize(("flag", "name"), [(flag, name) for flag, names in OF_SAMPLES.items() for name in names])
def test_exit_in_a_sample_function_ends_the_run_with_name_sample_and_line(
    flag, name, leaving, roll, make_args, tmp_path
):
    module, words = leaving
    path = f"{module}.{name}"
    named = "--" + ("custom_rm_path" if flag == "group_rm" else flag).replace("_", "-")
    changes = {"custom_rm_path": path, "group_rm": True} if flag == "group_rm" else {flag: path}
    if flag == "rollout_sample_hook_path":
        changes = {flag: [path]}
    error = raised_by(lambda: roll(contain=True, **changes))
    assert isinstance(error, SampleError), error
    text = str(error)
    assert f"(group 0) failed: {words}; its prompt: '0+0='" in text and "of sample " in text
    line = LEAVES if name == "leave" else LEAVES_ASYNC
    inner = "leave" if name == "leave" else "leave_async"
    assert f"in {named} {path}" in text
    if (words, name) != ("GeneratorExit", "leave_in_a_task"):  # for which Python reports no line to the waiting task
        assert f"leaving_functions.py:{line} in {inner}: " in text
    assert error.by_hook


@pytest.mark.parametrize("flag", OF_ROLLOUTS)
def test_exit_in_a_rollout_function_ends_the_run_with_name_and_line(flag, leaving, roll, make_args, make_eval_dataset):
    module, words = leaving
    path = f"{module}.{'Source' if flag == 'data_source_path' else 'leave'}"
    calls = OF_ROLLOUTS[flag]
    if calls is None or calls is evaluation:
        error = raised_by(lambda: roll(calls, **{flag: path}, eval_datasets=[make_eval_dataset()]))
    else:
        error = raised_by(lambda: calls(make_args(**{flag: path})))
    assert isinstance(error, HookFailedError), error
    text = str(error)
    assert text.startswith(f"--{flag.replace('_', '-')} {path} raised {words}\n")
    assert f"leaving_functions.py:{LEAVES} in leave: " in text


def test_every_rollout_hook_of_the_table_is_tested():
    known = {f"`--{flag.replace('_', '-')}`" for flag in {*OF_SAMPLES, *OF_ROLLOUTS} - {"group_rm"}}
    around = {flag.split(" with ")[0] for flag, row in ROWS.items() if row[4].strip().startswith("`rollout/")}
    assert around == known


@pytest.mark.parametrize(
    "contract",
    [one for one in CONTRACTS if not inspect.iscoroutinefunction(one.__call__)],
    ids=lambda one: one.__name__,
)
def test_exit_in_an_ordinary_function_is_named_with_its_line(contract, leaving):
    module, words = leaving
    call = hooks.named("--its-flag", f"{module}.leave", contract)
    error = raised_by(call)
    assert isinstance(error, HookFailedError)
    assert str(error).startswith(f"--its-flag {module}.leave raised {words}\n")
    assert f"leaving_functions.py:{LEAVES} in leave: " in str(error)


def test_sample_whose_function_exits_is_skipped_by_the_flag(roll, exiting):
    output = roll(custom_rm_path="leaving_functions.first_leaves", skip_failed_samples=True)
    assert [group[0].group_index for group in output.groups] == [1, 2, 3, 4]
    assert output.metrics == {"rollout/failed_samples": 1.0}


def test_functions_that_always_exit_end_the_run_at_the_limit(roll, exiting):
    error = raised_by(
        lambda: roll(custom_rm_path="leaving_functions.leave_async", skip_failed_samples=True, max_failed_samples=2)
    )
    assert "SystemExit: 3" in str(error) and "more than --max-failed-samples 2" in str(error)


def test_internal_cancellation_reaches_functions_and_is_not_their_failure(roll, exiting):
    error = raised_by(lambda: roll(custom_generate_function_path="leaving_functions.first_leaves_others_wait"))
    assert "generation of sample 1 (group 0) failed: SystemExit: 3" in str(error)
    assert sorted(sys.modules["leaving_functions"].ended) == [0, 2, 3, 4, 5, 6, 7]


def test_function_that_cancels_its_own_task_is_named(roll, exiting):
    error = raised_by(lambda: roll(custom_rm_path="leaving_functions.cancel_itself"))
    assert isinstance(error, SampleError) and "failed: CancelledError; its prompt" in str(error)
    error = raised_by(lambda: roll(custom_rm_path="leaving_functions.cancel_itself_and_return"))
    assert isinstance(error, HookFailedError) and "a custom function cancelled the slimrl task" in str(error)


def test_exit_is_found_behind_an_exception_group(roll, exiting):
    error = raised_by(lambda: roll(contain=True, custom_rm_path="leaving_functions.leave_in_a_group"))
    assert isinstance(error, SampleError)
    assert "TaskGroup (1 sub-exception): SystemExit: 3; its prompt" in str(error)
    assert f"leaving_functions.py:{LEAVES_ASYNC} in leave_async: sys.exit(3)" in str(error)


def test_exit_in_an_unawaited_task_leaves_the_loop_running(exiting, tmp_path):
    async def main():
        hooks.contain_tasks(asyncio.get_running_loop())
        module = hooks.resolve("leaving_functions.leave_async", hooks.CustomReward)
        with hooks.in_hook():
            forgotten = asyncio.create_task(module())
        await asyncio.sleep(0.01)
        return forgotten.exception()

    error = asyncio.run(main())
    assert isinstance(error, hooks.HookExitError) and isinstance(error.__cause__, SystemExit)


def test_rollout_function_that_raises_stopiteration_ends_the_run(roll, tmp_path, monkeypatch):
    (tmp_path / "stopping_function.py").write_text("def roll(*arguments, **keywords):\n    next(iter([]))\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookFailedError, match="stopping_function.roll raised StopIteration\n .*:2 in roll: next"):
        roll(rollout_function_path="stopping_function.roll")


def test_module_that_exits_on_import_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "exits_on_import.py").write_text("import sys\nsys.exit('no GPU here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = raised_by(lambda: hooks.resolve("exits_on_import.reward", hooks.CustomReward))
    assert isinstance(error, hooks.HookError)
    assert "itself cannot be imported (SystemExit: no GPU here): fix the module" in str(error)


def test_failed_sample_has_the_failed_status(roll, exiting, monkeypatch):
    seen = []
    monkeypatch.setattr(RolloutDataSource, "add_samples", lambda self, groups: None)
    original = RolloutDataSource.get_samples
    monkeypatch.setattr(RolloutDataSource, "get_samples", lambda self, n: seen.extend(original(self, n)) or seen[-n:])
    raised_by(lambda: roll(custom_rm_path="leaving_functions.first_leaves"))
    assert seen[0][1].status is SampleStatus.FAILED
