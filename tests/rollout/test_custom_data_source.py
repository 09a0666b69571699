"""A custom data source replaces the built-in one, is checked at startup and resumes after a restart."""

import asyncio
import json
import sys

import pytest

from slimrl import hooks
from slimrl.arguments.namespace import Context
from slimrl.arguments.validation.custom_functions import hooks_keep_their_contracts
from slimrl.hooks import HookError, HookFailedError
from slimrl.rollout.dataset.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, open_data_source
from tests.rollout.async_helpers import async_generation
from tests.rollout.test_async_rollout import scripted

SOURCE = """
import json, pathlib
from slimrl.data.sample import Sample
from slimrl.rollout.dataset.data_source import RolloutDataSource

class Counting:
    def __init__(self, args):
        self.args, self.next, self.waiting = args, 0, []
    def get_samples(self, num_groups):
        groups, self.waiting = self.waiting[:num_groups], self.waiting[num_groups:]
        while len(groups) < num_groups:
            groups.append([Sample(prompt=f"{self.next}+1=", label=self.next + 1) for _ in range(2)])
            self.next += 1
        return groups
    def add_samples(self, groups):
        self.waiting += groups
    def __len__(self):
        return 7
    def state_dict(self):
        return {"next": self.next}
    def load_state_dict(self, state):
        self.next = state["next"]

class Saving(Counting):
    state_dict = load_state_dict = None
    def __init__(self, args, tokenizer):
        super().__init__(args)
        self.tokenizer = tokenizer
    def save(self, rollout_id):
        (pathlib.Path(self.args.save) / f"place_{rollout_id}").write_text(str(self.next))
    def load(self, rollout_id):
        self.next = int((pathlib.Path(self.args.save) / f"place_{rollout_id}").read_text())

class Based(RolloutDataSource):
    def get_samples(self, num_groups):
        return super().get_samples(num_groups)[::-1]

class Talking(Counting):
    def get_samples(self, num_groups):
        return [[Sample(prompt=[{"role": "user", "content": "hi"}])] for _ in range(num_groups)]

class Short(Counting):
    def get_samples(self, num_groups):
        return super().get_samples(num_groups)[1:]

class Failing(Counting):
    def get_samples(self, num_groups):
        raise KeyError("row 3")

class Forgetful:
    def __init__(self, args): ...
    def get_samples(self, num_groups): ...
    def add_samples(self, groups): ...
    def __len__(self): return 0

class Blind(Forgetful):
    def get_samples(self): ...

class Mute(Forgetful):
    add_samples = None

number = 3
"""
MODULE = "slimrl_data_source_under_test"
SAVED = [[], ["place_1"], ["place_1"], ["place_1", "place_3"]]


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(MODULE, None)


@pytest.fixture
def opened(make_args, tokenizer):
    def make(name, **overrides):
        return open_data_source(make_args(data_source_path=f"{MODULE}.{name}", **overrides), tokenizer)

    return make


def test_built_in_source_is_the_default_under_both_names(make_args, tokenizer):
    assert RolloutDataSourceWithBuffer is RolloutDataSource
    for path in (
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "slimrl.rollout.dataset.data_source.RolloutDataSource",
    ):
        assert type(open_data_source(make_args(data_source_path=path), tokenizer)) is RolloutDataSource


def test_samples_get_the_tokens_of_their_text_and_sequential_indices(opened, tokenizer):
    source = opened("Counting")
    groups = source.get_samples(1) + source.get_samples(2)
    assert [[(s.group_index, s.index, s.label) for s in group] for group in groups] == [
        [(0, 0, 1), (0, 1, 1)],
        [(1, 2, 2), (1, 3, 2)],
        [(2, 4, 3), (2, 5, 3)],
    ]
    assert groups[2][0].tokens == tokenizer("2+1=", add_special_tokens=False)["input_ids"]
    assert len(source) == 7
    assert source.next == 3  # other attributes of the class are accessible


def test_returned_groups_keep_their_indices(opened):
    source = opened("Counting")
    groups = source.get_samples(2)
    source.add_samples(groups[1:])
    again, new = source.get_samples(2)
    assert again == groups[1]
    assert [sample.index for sample in again + new] == [2, 3, 4, 5]


def test_messages_are_rendered_by_the_chat_template_with_the_flag(opened, tokenizer):
    message = {"role": "user", "content": "hi"}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    ((sample,),) = opened("Talking", apply_chat_template=True).get_samples(1)
    assert sample.prompt == rendered
    assert sample.tokens == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    ((sample,),) = opened("Talking").get_samples(1)
    assert (sample.prompt, sample.tokens) == ([message], [])


def test_class_with_state_resumes_at_its_position(opened):
    source, resumed = opened("Counting"), opened("Counting")
    source.get_samples(3)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(2) == source.get_samples(2)


def test_class_with_files_saves_after_each_rollout_and_loads_the_resumed_one(opened, tmp_path, tokenizer):
    source, resumed = opened("Saving", save=str(tmp_path)), opened("Saving", save=str(tmp_path))
    assert source.tokenizer is tokenizer
    states = []
    for rollout_id in range(3):
        source.begin_rollout(rollout_id)
        source.get_samples(2)
        states.append(json.loads(json.dumps(source.state_dict())))
    resumed.load_state_dict(states[1])
    assert [group[0].label for group in resumed.get_samples(2)] == [5, 6]
    assert sorted(path.name for path in tmp_path.glob("place_*")) == ["place_0", "place_1", "place_2"]


def test_fully_async_generation_saves_once_per_checkpointed_rollout(opened, make_args, tokenizer, tmp_path):
    changes = {"save": str(tmp_path), "data_source_path": f"{MODULE}.Saving", "rollout_all_samples_process_path": None}
    args, source = scripted(make_args, max_weight_staleness=1, **changes), opened("Saving", save=str(tmp_path))

    async def main():
        outputs = []
        async with async_generation(args, tokenizer, source=source) as (generator, _, engine):
            for rollout, engine.version in enumerate((0, 0, 1, 2)):  # rollout 1 is ready before its weights
                generator.continuous.set_weight_version(engine.version, 9)
                outputs.append(await generator.generate_rollout(rollout, source, saved=rollout % 2 == 1))
                assert sorted(path.name for path in tmp_path.glob("place_*")) == SAVED[rollout]
        return outputs

    outputs = asyncio.run(main())
    assert [output.data_state and output.data_state["saved_after"] for output in outputs] == [None, 1, None, 3]
    known = [group[0].group_index for output in outputs for group in output.groups] + [
        group[0]["group_index"] for group in outputs[3].data_state["inflight_groups"]["unfinished"]
    ]
    known += [one["group"][0]["group_index"] for one in outputs[3].data_state["inflight_groups"]["finished"]]
    assert sorted(known) == list(range(int((tmp_path / "place_3").read_text())))


def test_nothing_is_saved_without_a_checkpoint_folder(opened, tmp_path):
    source = opened("Saving")
    source.begin_rollout(0)
    assert source.state_dict()["saved_after"] == 0


def test_class_may_extend_the_built_in_source(opened):
    source, resumed = opened("Based"), opened("Based")
    source.begin_rollout(4)
    assert [group[0].prompt for group in source.get_samples(3)] == ["2+2=", "1+1=", "0+0="]
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(3) == source.get_samples(3)


def test_state_of_another_data_source_is_rejected(opened, make_args, tokenizer):
    for state in (RolloutDataSource(make_args(), tokenizer).state_dict(), {"indices": [0, 0], "saved_after": 3}):
        with pytest.raises(ValueError, match="written with another data source than --data-source-path .*Counting"):
            opened("Counting").load_state_dict(state)


def test_invalid_groups_are_rejected_and_failures_named(opened):
    with pytest.raises(ValueError, match=r"Short returned 2 groups when asked for 3: return a list of exactly"):
        opened("Short").get_samples(3)
    with pytest.raises(HookFailedError, match=r"--data-source-path .*Failing raised KeyError: 'row 3'"):
        opened("Failing").get_samples(3)


EXPECTED = "expected a class with __init__(args), get_samples(num_groups), add_samples(groups) and __len__()"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("number", f"{MODULE}.number is not a class but a value of type int: {EXPECTED}"),
        ("Mute", f"{MODULE}.Mute has no add_samples: {EXPECTED}"),
        (
            "Blind",
            f"{MODULE}.Blind.get_samples cannot be called as needed (too many positional arguments): {EXPECTED}",
        ),
        (
            "Forgetful",
            f"{MODULE}.Forgetful cannot save its position in a checkpoint: give it state_dict() and"
            " load_state_dict(state), or save(rollout_id) and load(rollout_id)",
        ),
        ("Countin", f"module {MODULE} has no Countin: did you mean Counting?"),
    ],
)
def test_class_that_breaks_the_contract_is_rejected_at_startup(make_args, name, sentence):
    with pytest.raises(HookError) as caught:
        hooks.resolve_data_source(f"{MODULE}.{name}")
    assert str(caught.value) == sentence
    args = make_args(data_source_path=f"{MODULE}.{name}")
    (problem,) = hooks_keep_their_contracts(args, Context("train.py", frozenset(), frozenset()))
    assert str(problem).startswith(f"--data-source-path {MODULE}.{name}: {sentence}")
