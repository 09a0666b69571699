"""Modules written for slime are imported or rejected as docs/coming-from-slime.md says."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.compatibility import slime
from slimrl.data.sample import NOT_SERVED, Sample, SampleStatus
from slimrl.hooks import CustomGenerate, CustomReward, CustomTIS, HookError, resolve
from tests.compatibility.conftest import STYLE

ROOT = STYLE.parents[2]
PAGE = (ROOT / "docs/coming-from-slime.md").read_text()


@pytest.mark.parametrize(
    ("path", "contract"),
    [
        ("search_agent.generate", CustomGenerate),
        ("search_agent.reward_func", CustomReward),
        ("tool_agent.generate", CustomGenerate),
        ("tool_agent.reward_func", CustomReward),
        ("mismatch.bounded_weights", CustomTIS),
    ],
)
def test_slime_module_is_found_and_keeps_its_contract(path, contract):
    assert resolve(path, contract).__name__ == path.rpartition(".")[2]


def test_every_provided_name_can_be_imported():
    for offer in slime.OFFERS:
        assert callable(slime.load(offer.module, offer.name))
    resolve("mismatch.bounded_weights", CustomTIS)  # like any hook, it makes slime's names importable
    from slime.utils import types
    from slime.utils.types import Sample as Theirs

    assert Theirs is Sample and types.__all__ == ["Sample"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from slime.utils.types import ParamInfo", "slimrl has no counterpart of slime.utils.types.ParamInfo"),
        ("from slime.utils.types import ParamInfo", "Supported in slime.utils.types: Sample"),
        (
            "from slime.utils import http_util",
            "Supported in slime.utils: slime.utils.async_utils, slime.utils.http_utils",
        ),
        ("from slime.utils.http_utils import posts", "did you mean slime.utils.http_utils.post?"),
        ("import slime.ray.rollout", "get everything they need as arguments"),
        ("from slime.rollout.sglang_rollout import generate_and_rm_group", "train_async.py --max-weight-staleness"),
        ("from slime.backends.megatron_utils.loss import policy_loss_function", "batch.scores(logits)"),
    ],
)
def test_missing_import_lists_the_provided_names(tmp_path, monkeypatch, line, message):
    (tmp_path / "own_functions.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookError) as raised:
        resolve("own_functions.generate", CustomGenerate)
    assert message in str(raised.value) and "docs/coming-from-slime.md" in str(raised.value)


@pytest.mark.parametrize("installed", [True, False])
def test_installed_slime_takes_precedence_and_a_plain_folder_does_not(tmp_path, installed):
    package = tmp_path / "slime/utils"
    package.mkdir(parents=True)
    if installed:
        (tmp_path / "slime/__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "types.py").write_text("class Sample: theirs = True\n")
    code = """
        from slimrl.hooks.loader import offer_slime_modules
        offer_slime_modules()
        offer_slime_modules()
        from slime.utils.types import Sample
        print(hasattr(Sample, "theirs"))
        try:
            import slime.utils.http_utils
            print("http_utils")
        except ModuleNotFoundError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, env=path, cwd=tmp_path, timeout=60)
    missing = "No module named 'slime.utils.http_utils'"
    expected = ["True", missing] if installed else ["False", "http_utils"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_page_has_the_tables():
    assert slime.table() in PAGE
    assert slime.table_of_refusals() in PAGE
    for name in NOT_SERVED:
        assert f"`{name}`" in PAGE


# -- Sample


def test_sample_tracks_appended_tokens():
    sample = Sample(prompt="1+1=", tokens=[1, 2], loss_mask=[])
    mask = sample.loss_mask
    meta = {"finish_reason": {"type": "length"}, "weight_version": "3"}
    sample.append_response_tokens(None, tokens=[5, 6], log_probs=[-0.5, -0.25], meta_info=meta, text="ab")
    assert sample.status is SampleStatus.TRUNCATED
    sample.append_response_tokens(tokens=[7], trainable=False, text="c")
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
    sample.append_response_tokens(
        tokens=[8], log_probs=torch.tensor([-1.0]), meta_info=meta, update_terminal_info=False
    )
    assert sample.status is SampleStatus.TRUNCATED
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 5, 6, 7, 8], 4, "abc")
    assert sample.loss_mask == [1, 1, 0, 1] and sample.loss_mask is mask
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.version_spans == [["3", 2], ["", 1], ["4", 1]] and sample.weight_versions == ["3", "4"]
    assert sample.effective_response_length == 3 and Sample(response_length=2).effective_response_length == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [1]}, "1 trainable tokens came without log_probs"),
        ({"tokens": [1], "log_probs": [0.0], "trainable": False}, "tokens with trainable=False came with log_probs"),
        ({"tokens": [1], "log_probs": [0.0, 0.0]}, "1 tokens came with 2 log_probs"),
    ],
)
def test_tokens_without_matching_log_probs_are_not_appended(given, message):
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**given)


def test_sample_has_the_slime_names_and_reports_missing_fields():
    sample = Sample(reward={"acc": 0.5})
    assert sample.get_reward_value(Arguments(reward_key="acc")) == 0.5
    assert Sample(reward=0.25).get_reward_value(Arguments()) == 0.25
    assert [status.value for status in Sample.Status] == ["pending", "completed", "truncated", "aborted", "failed"]
    assert sample.multimodal_inputs is None and getattr(sample, "tool_call_count", 7) == 7
    with pytest.raises(AttributeError, match="a Sample has no tool_call_count: .* store custom values in metadata"):
        _ = sample.tool_call_count
    assert Sample.from_dict(sample.to_dict()) == sample and pickle.loads(pickle.dumps(sample)) == sample


# -- args


def test_custom_settings_and_engine_flags_are_attributes():
    own = {"bound_low": 0.5, "lr": 3.0}
    args = Arguments(custom=own, sglang_options={"dp_size": 2}, router_options={"policy": "random"}, lr=1e-6)
    args = pickle.loads(pickle.dumps(args))
    assert (args.bound_low, args.sglang_dp_size, args.router_policy, args.lr) == (0.5, 2, "random", 1e-6)
    assert getattr(args, "sglang_speculative_algorithm", None) is None
    with pytest.raises(AttributeError, match="args.bound_high is neither a flag nor a custom setting: put it under"):
        _ = args.bound_high
    with pytest.raises(AttributeError, match="args.sglang_tp_size .* give --sglang-tp-size"):
        _ = args.sglang_tp_size
