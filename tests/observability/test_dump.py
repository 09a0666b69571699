"""Rollout dumps: bit-exact round trip, readable lines, and errors."""

import asyncio
import dataclasses
import json
import math
import random

import numpy
import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.observability import show
from slimrl.observability.rollout_dump import RolloutDumps, dump_path, load_rollout, read_dump, save_rollout


def make_samples() -> list[Sample]:
    rng = random.Random(0)
    return [
        Sample(
            prompt=[{"role": "user", "content": f"what is {index} + 1?"}],
            group_index=index // 2,
            index=index,
            label=str(index + 1),
            tokens=[rng.randint(0, 150_000) for _ in range(9)],
            response=f"it is [{index + 1}] …",
            response_length=4,
            loss_mask=[1, 1, 0, 1],
            rollout_log_probs=[-rng.random() * 1e-3 for _ in range(4)],
            weight_versions=["3", "4"],
            reward={"accuracy": 1.0} if index % 2 else 0.25,
            status=SampleStatus.TRUNCATED if index == 1 else SampleStatus.COMPLETED,
            remove_sample=index == 2,
            metadata={"nested": {"level": 2}, "none": None},
        )
        for index in range(4)
    ]


def test_samples_round_trip_bit_for_bit(tmp_path):
    template = str(tmp_path / "dumps" / "rollout_{rollout_id}.jsonl")
    path = save_rollout(template, 7, make_samples(), metrics={"rollout/raw_reward": 0.5})
    header, samples = load_rollout(template, 7)
    assert path == tmp_path / "dumps" / "rollout_7.jsonl"
    assert samples == make_samples()
    assert header["rollout_id"] == 7
    assert header["metrics"] == {"rollout/raw_reward": 0.5}


def test_every_line_is_json_for_other_tools(tmp_path):
    path = save_rollout(str(tmp_path / "{rollout_id}"), 0, make_samples())
    header, *samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["samples"] == 4
    assert [sample["response"] for sample in samples] == ["it is [1] …", "it is [2] …", "it is [3] …", "it is [4] …"]


def test_line_is_the_sample_as_plain_data(tmp_path):
    @dataclasses.dataclass
    class Score:
        score: float

    (sample, *_) = make_samples()
    sample.metadata["score"] = Score(0.5)
    sample.scratch = "an attribute of a user's own, which no reader knows"
    path = save_rollout(str(tmp_path / "{rollout_id}"), 0, [sample])
    assert json.loads(path.read_text().splitlines()[1]) == json.loads(json.dumps(sample.to_dict()))


def test_evaluation_has_its_own_file_name(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    assert save_rollout(template, 3, make_samples(), evaluation=True).name == "eval_3.jsonl"
    assert load_rollout(template, 3, evaluation=True).header["evaluation"] is True


@pytest.mark.parametrize("form", ["{rollout_id}.jsonl", "r[{rollout_id}]/{rollout_id}.jsonl", "./a//x_{rollout_id}"])
def test_only_the_newest_rollouts_and_evaluations_are_kept(tmp_path, form):
    template = f"{tmp_path}/{form}"
    other = tmp_path / "notes_7.txt"
    other.touch()
    for number in (0, 1, 2, 9, 10):
        save_rollout(template, number, make_samples()[:1], limit=3)
    for number in (0, 5, 10, 15):
        save_rollout(template, number, make_samples()[:1], evaluation=True, limit=3)
    kept = {path for path in tmp_path.rglob("*") if path.is_file()} - {other}
    assert kept == {
        *(dump_path(template, number) for number in (2, 9, 10)),
        *(dump_path(template, number, evaluation=True) for number in (5, 10, 15)),
    }
    assert other.exists()


def test_resumed_run_keeps_later_files_of_an_earlier_run(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    for number in range(6):
        save_rollout(template, number, make_samples()[:1])
    save_rollout(template, 3, make_samples()[:1], limit=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.jsonl", "4.jsonl", "5.jsonl"]


def test_repeated_rollout_replaces_its_file_and_leaves_no_other(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    save_rollout(template, 0, make_samples())
    save_rollout(template, 0, make_samples()[:1])
    assert len(load_rollout(template, 0).samples) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["0.jsonl"]


def test_arrays_in_the_metadata_become_lists(tmp_path):
    template = str(tmp_path / "{rollout_id}")
    sample = Sample(prompt="p", index=0, metadata={"array": numpy.arange(3), "scalar": numpy.float32(0.5)})
    save_rollout(template, 0, [sample])
    assert load_rollout(template, 0).samples[0].metadata == {"array": [0, 1, 2], "scalar": 0.5}


def test_nan_log_prob_round_trips(tmp_path):
    template = str(tmp_path / "{rollout_id}")
    save_rollout(template, 0, [Sample(prompt="p", rollout_log_probs=[math.nan, -math.inf])])
    log_probs = load_rollout(template, 0).samples[0].rollout_log_probs
    assert math.isnan(log_probs[0])
    assert log_probs[1] == -math.inf


def test_value_outside_json_is_rejected_by_sample_and_keeps_the_earlier_dump(tmp_path):
    template = str(tmp_path / "{rollout_id}")
    save_rollout(template, 0, make_samples())
    with pytest.raises(TypeError, match="sample 5 cannot be written to a rollout dump: a object is no JSON value"):
        save_rollout(template, 0, [Sample(prompt="p", index=5, metadata={"x": object()})])
    assert len(load_rollout(template, 0).samples) == 4
    assert len(list(tmp_path.iterdir())) == 1


def test_template_without_a_rollout_placeholder_is_rejected():
    with pytest.raises(ValueError, match="'out.jsonl' has no {rollout_id}"):
        dump_path("out.jsonl", 0)


def test_missing_foreign_and_truncated_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="no rollout dump .*5.jsonl"):
        load_rollout(str(tmp_path / "{rollout_id}.jsonl"), 5)
    foreign = tmp_path / "foreign.jsonl"
    for content in ("", "[1]\n", '{"prompt": 1}\n', "PK\n"):
        foreign.write_text(content)
        with pytest.raises(ValueError, match="foreign.jsonl is no rollout dump"):
            read_dump(foreign)
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 0, make_samples())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="holds 3 samples and its header says 4: it was cut off"):
        read_dump(path)


def test_show_prints_a_table_and_the_selected_samples_verbatim(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 12, make_samples())
    assert show.main([str(path), "--sample", "1"]) == 0
    printed = capsys.readouterr().out
    assert "rollout 12: 4 samples" in printed
    assert "completed (removed)" in printed
    assert "it is [2] …" in printed, "square brackets are text, not markup"
    assert "[user] what is 1 + 1?" in printed
    assert "it is [3]" not in printed


def test_selected_reward_entries_are_stored_only_for_dict_rewards(tmp_path):
    keys = ["accuracy", "accuracy", None, "score"]
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 0, make_samples(), reward_keys=keys)
    assert read_dump(path).header["reward_keys"] == [["accuracy", 2], [None, 1], ["score", 1]]
    assert read_dump(path).reward_keys() == keys
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 1, make_samples(), reward_keys=[None] * 4)
    assert "reward_keys" not in read_dump(path).header
    assert read_dump(path).reward_keys() == [None] * 4


@pytest.mark.parametrize(("flags", "shown"), [([], "0.25"), (["--reward-key", "length"], "7")])
def test_show_has_the_selected_reward_entry_in_the_table_and_the_full_reward_below(
    tmp_path, capsys, monkeypatch, flags, shown
):
    monkeypatch.setenv("COLUMNS", "100")
    reward = {"accuracy": 0.25, "length": 7, "reason": "it is nearly right"}
    sample = Sample(prompt="p", index=0, group_index=0, tokens=[1, 2], response_length=1, reward=reward)
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 0, [sample], reward_keys=["accuracy"])
    assert show.main([str(path), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("│ ") and "pending" in line]
    assert row.split("│")[4].strip() == shown
    assert any('reward: {"accuracy": 0.25, "length": 7, "reason": "it is nearly right"}' in line for line in lines)


def test_show_rejects_missing_samples(tmp_path, capsys):
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 0, make_samples())
    assert show.main([str(path), "--sample", "9"]) == 2
    assert capsys.readouterr().err == "no sample 9 in this dump: it has 0, 1, 2, 3\n"
    assert show.main([str(tmp_path / "none")]) == 2


def test_dumps_are_written_in_the_background_in_order_and_errors_come_at_the_end(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    dumps, unwritable = RolloutDumps(template, limit=2), make_samples()
    unwritable[2].metadata["set"] = object()

    async def write() -> None:
        await dumps.finish()  # nothing was started
        for rollout_id in range(3):
            dumps.start(rollout_id, make_samples(), {}, [None] * 4)
        await dumps.finish()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl"]
        dumps.start(3, unwritable, {}, [None] * 4)
        with pytest.raises(TypeError, match="sample 2 cannot be written"):
            await dumps.finish()
        await dumps.finish()  # reported once

    asyncio.run(write())
    assert load_rollout(template, 2).samples == make_samples()
    RolloutDumps(None, None).start(0, unwritable, {}, [None] * 4)
