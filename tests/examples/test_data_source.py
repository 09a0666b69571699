"""The example data source: correct sums that grow harder, and the same data after a restart."""

import json

from slimrl.arguments import Arguments
from slimrl.hooks import resolve_data_source
from slimrl.rollout.dataset.data_source import open_data_source

PATH = "examples.data_source.Additions"


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [ord(character) for character in text]}


def opened():
    return open_data_source(Arguments(data_source_path=PATH, n_samples_per_prompt=2), Characters())


def test_example_keeps_the_contract():
    assert resolve_data_source(PATH).__name__ == "Additions"


def test_sums_are_correct_and_grow_longer():
    source = opened()
    samples = [group[0] for group in source.get_samples(2001)]
    assert all(int(s.label) == sum(map(int, s.prompt.rstrip("=").split("+"))) for s in samples)
    assert [len(samples[at].prompt) for at in (0, 999, 1000, 2000)] == [4, 4, 6, 8]
    assert "".join(map(chr, samples[7].tokens)) == samples[7].prompt
    assert [samples[5].group_index, samples[5].index] == [5, 10]


def test_data_source_resumes_with_its_pending_groups():
    source, resumed = opened(), opened()
    groups = source.get_samples(4)
    source.add_samples(groups[2:])
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    expected = source.get_samples(5)
    assert expected[:2] == groups[2:]
    assert resumed.get_samples(5) == expected
