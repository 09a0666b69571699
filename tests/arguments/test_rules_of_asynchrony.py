"""Rules about generation beside training: each lets what works pass and says the rest in one sentence."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.validation import rollout

SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"
ENDLESS = "--max-weight-staleness 2 generates fully asynchronously"


def problems(recipe, more, entry="train_async.py"):
    args, found = read_args(recipe.line(more, placement=SPLIT), entry=entry)
    return args, [str(problem) for problem in found]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """SGLang 0.5.21, and by `set` others."""

    def set_to(version):
        monkeypatch.setattr(rollout.importlib.metadata, "version", lambda name: version)

    set_to("0.5.21")
    return set_to


@pytest.mark.parametrize(
    ("more", "in_flight"),
    [
        ("", False),
        ("--update-weights-in-flight", True),
        ("--max-weight-staleness 0", True),
        ("--max-weight-staleness 3 --update-weights-interval 4", True),
        ("--max-weight-staleness 3 --no-update-weights-in-flight", False),
    ],
)
def test_what_can_run_beside_training_passes(recipe, more, in_flight):
    args, found = problems(recipe, more)
    assert found == [] and args.update_weights_in_flight is in_flight


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--max-weight-staleness 2 --partial-rollout",
            f"{ENDLESS}, and no rollout cuts anything off to be continued: leave --partial-rollout out.",
        ),
        (
            "--max-weight-staleness 2 --discard-surplus-groups",
            f"{ENDLESS}, and no rollout has a surplus: leave --discard-surplus-groups out; what is too old is generated"
            " again.",
        ),
        (
            "--max-weight-staleness 2 --over-sampling-batch-size 64",
            f"{ENDLESS}: how much is in progress follows from --max-weight-staleness and --sglang-server-concurrency;"
            " leave --over-sampling-batch-size 64 out.",
        ),
        (
            "--max-weight-staleness 2 --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout",
            f"{ENDLESS}, and --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout makes one rollout"
            " after the other: leave one of the two out; --custom-generate-function-path makes single samples.",
        ),
        (
            "--max-weight-staleness 1 --update-weights-interval 3",
            "--max-weight-staleness 1 cannot be kept with --update-weights-interval 3, with which engines are 2"
            " rollouts behind before each weight update: give at least 2, or update more often.",
        ),
    ],
)
def test_what_makes_no_sense_without_end_is_one_sentence(recipe, more, sentence):
    assert problems(recipe, more)[1] == [sentence]


@pytest.mark.parametrize("flag", ["--max-weight-staleness 2", "--update-weights-in-flight"])
def test_train_py_refuses_what_runs_beside_training(recipe, flag):
    assert problems(recipe, flag, "train.py")[1] == [
        f"{flag} belongs to train_async.py; with train.py generation and training take turns: start train_async.py, or"
        " leave it out."
    ]


@pytest.mark.parametrize("flag", ["--max-weight-staleness 2", "--update-weights-in-flight"])
def test_an_sglang_that_would_read_stale_keys_and_values_is_told_not_to(recipe, installed, flag):
    installed("0.5.20.post1")
    assert problems(recipe, flag)[1] == [
        f"{flag} updates weights under running requests, which SGLang 0.5.20.post1 continues with stale keys and values"
        " out of its radix cache: add --sglang-disable-radix-cache, install sglang 0.5.21 or later, or give"
        " --no-update-weights-in-flight."
    ]
    assert problems(recipe, "--max-weight-staleness 2 --no-update-weights-in-flight")[1] == []
    args, _ = problems(recipe, flag)
    args.sglang_options["disable_radix_cache"] = True
    context = rollout.Context("train_async.py")
    assert list(rollout.requests_can_go_on(args, context)) == []
