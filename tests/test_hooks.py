"""A hook path leads to a function that keeps its contract, or to an error that names the expected signature."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

from slimrl import hooks

SOURCE = """
import functools

async def judge(args, sample, **kwargs):
    return 1.0

async def judge_strict(args, sample):
    return 1.0

async def judge_three(args, sample, extra):
    return 1.0

def judge_sync(args, sample):
    return 1.0

async def generate(args, sample, sampling_params, evaluation=False):
    return sample

async def generate_short(args, sample):
    return sample

def rollout(args, rollout_id, data_source, evaluation=False):
    return []

def rollout_blind(args, rollout_id, data_source):
    return []

def keep(args, samples, **kwargs):
    return True

async def keep_async(args, samples):
    return True

def post_process(args, samples):
    return [], []

class Judge:
    async def __call__(self, args, sample):
        return 1.0

judge_object = Judge()
judge_partial = functools.partial(judge, weight=2)
number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "slimrl_hooks_under_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("slimrl_hooks_under_test", None)


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("judge", hooks.CustomReward),
        ("judge_strict", hooks.CustomReward),
        ("judge_object", hooks.CustomReward),
        ("judge_partial", hooks.CustomReward),
        ("generate", hooks.CustomGenerate),
        ("rollout", hooks.RolloutFunction),
        ("keep", hooks.DynamicSamplingFilter),
        ("post_process", hooks.RewardPostProcess),
    ],
)
def test_functions_that_keep_their_contract_are_loaded(name, contract):
    function = hooks.resolve(f"slimrl_hooks_under_test.{name}", contract)
    assert function is vars(sys.modules["slimrl_hooks_under_test"])[name]


NOT_A_PATH = "is not a dotted import path: write package.module.function"
NO_MODULE = "check the spelling, or start from the folder that contains it"
NOT_CALLABLE = "cannot be called as needed"


@pytest.mark.parametrize(
    ("path", "contract", "sentence"),
    [
        ("judge", hooks.CustomReward, f"'judge' {NOT_A_PATH}"),
        ("rewards.py:judge", hooks.CustomReward, f"'rewards.py:judge' {NOT_A_PATH}"),
        ("slimrl_nowhere.judge", hooks.CustomReward, f"there is no module slimrl_nowhere: {NO_MODULE}"),
        (
            "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            hooks.RolloutFunction,
            "there is no module slimrl.rollout.fully_async_rollout: fully asynchronous generation is train_async.py"
            " --max-weight-staleness N here: leave --rollout-function-path out",
        ),
        (
            "fully_async_rollout.generate_rollout_fully_async",
            hooks.RolloutFunction,
            "there is no module fully_async_rollout: fully asynchronous generation is train_async.py"
            " --max-weight-staleness N here: leave --rollout-function-path out",
        ),
        (
            "slime_plugins.models.glm4.get_glm_spec",
            hooks.LayerSpec,
            "there is no module slime_plugins: the layers of every family are slimrl's own: leave --spec out",
        ),
        (
            "slime.backends.megatron_utils.loss.icepop_function",
            hooks.CustomReward,
            "there is no module slimrl.backends: IcePop is --use-tis --tis-mode mask here: leave"
            " --custom-tis-function-path out",
        ),
        (
            "slime.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
            hooks.CustomReward,
            "there is no module slimrl.train_infer_mismatch_helper: importance weights and rejection are --use-tis"
            " with --tis-level and --tis-mode, and --use-rs, here (docs/algorithms.md): leave"
            " --custom-tis-function-path out",
        ),
        (
            "slime.rollout.on_policy_distillation.reward_func_route_by_domain",
            hooks.CustomReward,
            "module slimrl.compatibility.rollout_helpers has no reward_func_route_by_domain: teachers by domain are"
            " --opd-teacher-models NAME ... with --opd-teacher-key domain here, which name frozen models of"
            " --sglang-config (or NAME=FOLDER, on GPUs beside those of --rollout-num-gpus): give these and --rm-type"
            " zero",
        ),
        ("slimrl.nowhere.deep.judge", hooks.CustomReward, f"there is no module slimrl.nowhere: {NO_MODULE}"),
        ("MODULE.juge", hooks.CustomReward, "module MODULE has no juge: did you mean judge?"),
        ("MODULE.zzz", hooks.CustomReward, "module MODULE has no zzz: check the spelling"),
        (
            "MODULE.number",
            hooks.CustomReward,
            "MODULE.number is not a function but a value of type int: expected async f(args, sample)",
        ),
        (
            "MODULE.judge_sync",
            hooks.CustomReward,
            "MODULE.judge_sync is not async: expected async f(args, sample)",
        ),
        (
            "MODULE.judge_three",
            hooks.CustomReward,
            f"MODULE.judge_three(args, sample, extra) {NOT_CALLABLE} (missing a required argument: 'extra'): expected"
            " async f(args, sample)",
        ),
        (
            "MODULE.generate_short",
            hooks.CustomGenerate,
            f"MODULE.generate_short(args, sample) {NOT_CALLABLE} (too many positional arguments): expected async"
            " f(args, sample, sampling_params)",
        ),
        (
            "MODULE.rollout_blind",
            hooks.RolloutFunction,
            f"MODULE.rollout_blind(args, rollout_id, data_source) {NOT_CALLABLE} (got an unexpected keyword argument"
            " 'evaluation'): expected f(args, rollout_id, data_source, evaluation=...)",
        ),
        (
            "MODULE.keep_async",
            hooks.DynamicSamplingFilter,
            "MODULE.keep_async is async: expected f(args, samples)",
        ),
    ],
)
def test_functions_that_break_their_contract_are_rejected_with_the_expectation(path, contract, sentence):
    with pytest.raises(hooks.HookError) as error:
        hooks.resolve(path.replace("MODULE", "slimrl_hooks_under_test"), contract)
    assert str(error.value).replace("slimrl_hooks_under_test", "MODULE") == sentence


def test_module_that_fails_on_import_is_distinguished_from_a_missing_one(tmp_path):
    (tmp_path / "slimrl_needs_more.py").write_text("import slimrl_not_installed\n")
    (tmp_path / "slimrl_broken.py").write_text("1 / 0\n")
    with pytest.raises(hooks.HookError, match="itself cannot be imported .No module named 'slimrl_not_installed'."):
        hooks.resolve("slimrl_needs_more.judge", hooks.CustomReward)
    with pytest.raises(hooks.HookError, match="itself cannot be imported .ZeroDivisionError: division by zero."):
        hooks.resolve("slimrl_broken.judge", hooks.CustomReward)


def test_current_folder_is_importable(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "slimrl_local_rewards.py").write_text("async def judge(args, sample): return 1.0\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert callable(hooks.resolve("slimrl_local_rewards.judge", hooks.CustomReward))


def test_slime_paths_map_to_slimrl():
    assert hooks.own_path("slime.rollout.rm_hub.async_rm") == "slimrl.rollout.rm_hub.async_rm"
    assert hooks.own_path("slimer.rollout.x") == "slimer.rollout.x"
    with pytest.raises(hooks.HookError, match="module slimrl.hooks has no nothing"):
        hooks.resolve("slime.hooks.nothing", hooks.CustomReward)


def test_keyword_is_passed_only_to_functions_that_accept_it():
    def plain(args, sample): ...

    def named(args, sample, evaluation=False): ...

    def anything(args, **kwargs): ...

    assert [hooks.accepts_keyword(f, "evaluation") for f in (plain, named, anything)] == [False, True, True]
    assert hooks.accepts_keyword(functools.partial(named, 1), "evaluation")


def test_function_may_require_what_its_contract_offers():
    def needs(args, sample, *, rollout_id): ...

    assert hooks.accepted(needs, hooks.SampleHook, rollout_id=3, evaluation=True) == {"rollout_id": 3}


PAGE = Path(hooks.__file__).parents[2] / "docs/hooks.md"
CONTRACTS = [value for value in vars(hooks).values() if hooks.Hook in getattr(value, "__mro__", ())[1:]]


ROWS = {row[1].strip(): row for row in (line.split("|") for line in PAGE.read_text().splitlines()) if len(row) == 7}


def rows_of(contract):
    """The rows of the flags at the start of the contract's docstring."""
    return [ROWS[flag.strip()] for flag in contract.__doc__.split(":")[0].split(",")]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_page_has_every_flag_with_its_call_and_valid_examples(contract):
    call = hooks.expectation(contract).removeprefix("expected ").removeprefix("async or ordinary ")
    for row in rows_of(contract):
        assert f"`{call}`" in row[2]
        examples = re.findall(r"`([a-z_.]+)`", row[5])
        assert any(path.startswith("examples.") for path in examples)
        for path in examples:
            hooks.resolve(path, contract)


def test_page_has_only_flags_with_a_contract_and_existing_files():
    flags = {flag.strip() for contract in CONTRACTS for flag in contract.__doc__.split(":")[0].split(",")}
    rows = {flag: row for flag, row in ROWS.items() if flag.startswith("`--")}
    assert rows.keys() == flags | {"`--data-source-path`"}
    for row in rows.values():
        assert (PAGE.parents[1] / "slimrl" / row[4].strip().strip("`")).exists()


def test_exception_in_a_function_is_reported_with_its_own_lines(tmp_path):
    (tmp_path / "slimrl_raises.py").write_text(
        "def keep(args, samples):\n    return inner(samples)\n\ndef inner(x):\n    return x[0]\n"
    )
    call = hooks.named("--dynamic-sampling-filter-path", "slimrl_raises.keep", hooks.DynamicSamplingFilter)
    with pytest.raises(hooks.HookFailedError) as caught:
        call(None, [])
    file = tmp_path / "slimrl_raises.py"
    assert str(caught.value).splitlines() == [
        "--dynamic-sampling-filter-path slimrl_raises.keep raised IndexError: list index out of range",
        f"  {file}:2 in keep: return inner(samples)",
        f"  {file}:5 in inner: return x[0]",
    ]
    assert call.__name__ == "keep" and isinstance(caught.value.__cause__, IndexError)


def test_teacher_of_slimes_example_is_slimrls_unless_the_folder_has_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = "examples.on_policy_distillation.on_policy_distillation.reward_func"
    assert hooks.own_path(example) == "slimrl.rollout.on_policy_distillation.reward_func"
    (tmp_path / "examples/on_policy_distillation").mkdir(parents=True)
    assert hooks.own_path(example) == example
