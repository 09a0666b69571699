"""A run with partial rollouts, a filter and a resume after a kill: sample accounting and correct log-probabilities."""

from __future__ import annotations

import json

import pytest
import torch

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
ROLLOUTS = 6
KEPT = 2  # rollouts before the checkpoint that the run is resumed from
BOOK = """
import json

def book(args, all_groups, data_source):
    with open("book.jsonl", "a") as file:
        file.write(json.dumps([group[0].group_index for group in all_groups]) + "\\n")

def log(rollout_id, args, samples, extra_metrics, rollout_time):
    with open("log.jsonl", "a") as file:
        file.write(json.dumps(extra_metrics) + "\\n")
"""


def flags(tiny, folder):
    return tiny.flags(
        colocate=True,
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        num_rollout=ROLLOUTS,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=KEPT,
        rollout_max_response_len=64,
        over_sampling_batch_size=20,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        dynamic_sampling_filter_path=("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
        rollout_all_samples_process_path="own_books.book",
        custom_rollout_log_function_path="own_books.log",
        save_debug_rollout_data=folder / "dumps/{rollout_id}.jsonl",
    )


@pytest.fixture(scope="module")
def resumed(tiny, tmp_path_factory):
    """The run, killed with SIGKILL after its first checkpoint and resumed."""
    folder = tmp_path_factory.mktemp("partial")
    (folder / "own_books.py").write_text(BOOK)
    first = harness.start("train.py", flags(tiny, folder), folder, "partial", tiny.home)
    first.wait_for_line(f"iter_{KEPT - 1:07d}", 150)
    first.kill_everything()
    newest = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text()) + 1
    lines = (folder / "book.jsonl").read_text().splitlines()
    done = harness.start("train.py", flags(tiny, folder), folder, "partial", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    done.folder = folder
    book = (folder / "book.jsonl").read_text().splitlines()
    # results after the newest checkpoint were lost with the process and are repeated
    done.scored = [json.loads(line) for line in book[:newest] + book[len(lines) :]]
    return done


def test_every_prompt_is_scored_once_or_still_pending_over_a_kill_and_resume(resumed):
    assert len(resumed.scored) == ROLLOUTS
    scored = [number for numbers in resumed.scored for number in numbers]
    last = resumed.folder / f"checkpoints/iter_{ROLLOUTS - 1:07d}/data_state.pt"
    state = torch.load(last, weights_only=True)
    waiting = [group[0]["group_index"] for group in state["returned"]]
    assert sorted(scored + waiting) == list(range(state["next_group_index"]))
    for rollout in range(ROLLOUTS):
        samples = read_dump(resumed.folder / f"dumps/{rollout}.jsonl").samples
        numbers = {sample.group_index for sample in samples}
        assert len(samples) == 32 and len(numbers) == 8 and numbers <= set(resumed.scored[rollout])


def test_training_data_was_sampled_by_the_trained_weights(resumed):
    metrics = [json.loads(line) for line in (resumed.folder / "log.jsonl").read_text().splitlines()]
    assert sum(entry["rollout/partial/continued"] for entry in metrics) > 0
    # engine and training agree about every token that is not masked
    assert max(resumed.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
