"""Rules about generation during training: valid flags pass, each violation is one error."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.validation import rollout

SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"
BOUNDED = "--max-weight-staleness 2 generates fully asynchronously"


def problems(recipe, more, entry="train_async.py"):
    args, found = read_args(recipe.line(more, placement=SPLIT), entry=entry)
    return args, [str(problem) for problem in found]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Installs SGLang 0.5.21, or another version by `set`."""

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
def test_features_that_run_during_training_are_accepted(recipe, more, in_flight):
    args, found = problems(recipe, more)
    assert found == [] and args.update_weights_in_flight is in_flight


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--max-weight-staleness 2 --partial-rollout",
            f"{BOUNDED} and never interrupts responses at the end of a rollout: leave --partial-rollout out.",
        ),
        (
            "--max-weight-staleness 2 --discard-surplus-groups",
            f"{BOUNDED} and has no surplus groups: leave --discard-surplus-groups out; groups that are too old are"
            f" regenerated.",
        ),
        (
            "--max-weight-staleness 2 --over-sampling-batch-size 64",
            f"{BOUNDED}: the number of groups in flight follows from --max-weight-staleness and"
            f" --sglang-server-concurrency; leave --over-sampling-batch-size 64 out.",
        ),
        (
            "--max-weight-staleness 2 --max-bad-rows 1"
            " --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout",
            f"{BOUNDED}, and --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout makes one rollout at"
            f" a time: leave one of the two out; --custom-generate-function-path generates single samples.",
        ),
        (
            "--max-weight-staleness 1 --update-weights-interval 3",
            "--max-weight-staleness 1 is too small for --update-weights-interval 3: engines are 2 rollouts behind"
            " before each weight update; give at least 2, or update more often.",
        ),
    ],
)
def test_invalid_flag_of_fully_async_training_is_one_error(recipe, more, sentence):
    assert problems(recipe, more)[1] == [sentence]


@pytest.mark.parametrize("flag", ["--max-weight-staleness 2", "--update-weights-in-flight"])
def test_train_py_rejects_features_that_run_during_training(recipe, flag):
    assert problems(recipe, flag, "train.py")[1] == [
        f"{flag} belongs to train_async.py, and train.py is synchronous: start train_async.py, or leave it out."
    ]


@pytest.mark.parametrize("flag", ["--max-weight-staleness 2", "--update-weights-in-flight"])
def test_sglang_option_that_would_read_stale_kv_is_rejected(recipe, installed, flag):
    installed("0.5.20.post1")
    assert problems(recipe, flag)[1] == [
        f"{flag} updates weights with requests in flight, and SGLang 0.5.20.post1 continues them with stale KV from"
        f" its radix cache: add --sglang-disable-radix-cache, install sglang 0.5.21 or later, or give"
        f" --no-update-weights-in-flight."
    ]
    assert problems(recipe, "--max-weight-staleness 2 --no-update-weights-in-flight")[1] == []
    args, _ = problems(recipe, flag)
    args.sglang_options["disable_radix_cache"] = True
    context = rollout.Context("train_async.py")
    assert list(rollout.in_flight_updates_are_supported(args, context)) == []
