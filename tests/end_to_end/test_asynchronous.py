"""A fully asynchronous run with random response lengths, killed and resumed: accounting, staleness, version spans."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROLLOUTS = 6
KEPT = 2  # rollouts before the checkpoint at which the run is killed
BOUND = 2
OWN = """
import json
import random
from slimrl.data.sample import SampleStatus
from slimrl.rollout.generation.multi_turn import append_generation

async def generate(args, sample, sampling_params, *, engine):
    length = min(int(random.Random(sample.index).lognormvariate(5.3, 0.8)) + 1, args.rollout_max_response_len)
    answer = await engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    append_generation(sample, answer)
    sample.response, sample.status = answer.text, SampleStatus.COMPLETED
    return sample

def book(args, all_groups, data_source):
    with open("book.jsonl", "a") as file:
        file.write(json.dumps([group[0].group_index for group in all_groups]) + "\\n")
"""


def flags(tiny, folder):
    return tiny.flags(
        actor_num_gpus_per_node=1,
        rollout_num_gpus=2,
        max_weight_staleness=BOUND,
        num_rollout=ROLLOUTS,
        n_samples_per_prompt=2,
        rollout_max_response_len=750,
        max_tokens_per_gpu=2048,
        rm_type="random",
        custom_generate_function_path="own_generation.generate",
        rollout_all_samples_process_path="own_generation.book",
        lr=1e-2,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=1,
        save_hf=folder / "hf/{rollout_id}",
        save_debug_rollout_data=folder / "dumps/{rollout_id}.jsonl",
        eval_interval=3,
        eval_prompt_data=["addition", f"{tiny.folder / 'eval.jsonl'}@[0:4]"],
        skip_eval_before_train=True,
    )


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The run, killed with SIGKILL after its second checkpoint and resumed: (its end, dumps, scored groups)."""
    folder = tmp_path_factory.mktemp("asynchronous")
    (folder / "own_generation.py").write_text(OWN)
    first = harness.start("train_async.py", flags(tiny, folder), folder, "asynchronous", tiny.home)
    first.wait_for_line(f"iter_{KEPT - 1:07d}", 150)
    first.kill_everything()
    kept = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text()) + 1
    lines = (folder / "book.jsonl").read_text().splitlines()
    (folder / "book.jsonl").write_text("".join(f"{line}\n" for line in lines[:kept]))
    done = harness.start("train_async.py", flags(tiny, folder), folder, "asynchronous", tiny.home).finish(200)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    dumps = [read_dump(folder / f"dumps/{rollout}.jsonl") for rollout in range(ROLLOUTS)]
    scored = [json.loads(line) for line in (folder / "book.jsonl").read_text().splitlines()]
    return done, dumps, scored, folder


def test_every_prompt_is_trained_once_despite_groups_in_flight_at_a_kill(run):
    _, dumps, scored, _ = run
    trained = [sample.group_index for dump in dumps for sample in dump.samples]
    assert Counter(trained) == dict.fromkeys(range(8 * ROLLOUTS), 2)
    assert sorted(number for numbers in scored for number in numbers) == list(range(8 * ROLLOUTS))


def test_token_staleness_stays_within_the_bound_with_updates_during_requests(run):
    done, dumps, _, _ = run
    several = 0
    for rollout, dump in enumerate(dumps):
        for sample in dump.samples:
            versions = [int(version) for version, _ in sample.version_spans]
            assert versions == sorted(set(versions)) and versions[-1] <= rollout
            assert sum(count for _, count in sample.version_spans) == sample.response_length
            assert rollout - versions[0] <= BOUND
            several += len(versions) > 1
        ages = Counter(rollout - int(sample.version_spans[0][0]) for sample in dump.samples)
        counts = {f"rollout/staleness/count_{age}": count for age, count in ages.items()}
        assert counts.items() <= dump.header["metrics"].items()
        assert dump.header["metrics"]["rollout/staleness/dropped"] == 0
    assert several >= 3
    assert max(done.steps("rollout/staleness/max")) == BOUND
    assert [entry["step"] for entry in done.summary["eval"]["history"]] == [3, 6]


def test_every_token_was_sampled_by_the_weights_of_its_span(run, tiny):
    from transformers import AutoModelForCausalLM

    _, dumps, _, folder = run
    paths = {"0": tiny.model, **{str(number + 1): folder / f"hf/{number}" for number in range(ROLLOUTS)}}
    everyone = [sample for dump in dumps for sample in dump.samples]
    samples = sorted(everyone, key=lambda sample: len(sample.version_spans))[-8:]
    assert len(samples[-1].version_spans) > 1
    named = {version for sample in samples for version, _ in sample.version_spans}
    models = {v: AutoModelForCausalLM.from_pretrained(paths[v], dtype=torch.float32).eval() for v in named}
    by_others = []
    for sample in samples:
        scores = {v: log_probs(models[v], sample) for v, _ in sample.version_spans}
        own, start = torch.tensor(sample.rollout_log_probs), 0
        for version, count in sample.version_spans:
            end = start + count
            differences = {v: float((score[start:end] - own[start:end]).abs().max()) for v, score in scores.items()}
            by_own = differences.pop(version)
            assert by_own < 1e-4
            if count >= 3:  # a certain token has nearly the same log-probability by all of them
                assert all(difference > 3 * by_own for difference in differences.values())
                by_others += differences.values()
            start = end
    assert max(by_others) > 3e-4  # one step of random rewards changes them by several times the allowed difference


def log_probs(model, sample) -> torch.Tensor:
    """Log-probabilities [response tokens]."""
    with torch.no_grad():
        scores = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
    rows = torch.arange(sample.prompt_length - 1, len(sample.tokens) - 1)
    return scores[rows, torch.tensor(sample.tokens[sample.prompt_length :])]
