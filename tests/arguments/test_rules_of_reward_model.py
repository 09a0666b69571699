"""Rules about training a reward model: a command line that passes, and each violation with its one error."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import read_args
from tests.arguments.test_rules_of_preference import HELD_OUT, UNREAD, UNREAD_OF_SAMPLING, pairs, without

LOSS = "--loss-type reward_model_loss"
SFT = "slimrl.rollout.sft_rollout.generate_rollout"
SCORED = (
    f"--reward-model-loss mse --rollout-function-path {SFT} --n-samples-per-prompt 1 --input-key messages"
    " --prompt-data {dir}/scored.jsonl"
)
__all__ = ["pairs"]  # a fixture

# rule -> (flags that pass when appended to a line that trains a reward model, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "reward_model_flags_have_their_loss": (
        ["--margin-key margin --prompt-data {dir}/margins.jsonl", f"{SCORED} --label-key score"],
        [
            (
                f"{SCORED} --label-key score --margin-key score",
                "--margin-key has no effect with --reward-model-loss mse: leave it out.",
            ),
            (
                "--reward-model-loss hinge",
                "--reward-model-loss hinge is not bradley_terry or mse.",
            ),
        ],
    ),
    "reward_model_training_is_consistent": (
        [HELD_OUT],
        [
            *(
                (flag, f"{flag.split()[0]} has no effect with {LOSS}: leave it out.")
                for flag in (
                    "--use-kl-loss",
                    "--entropy-coef 0.1",
                    "--use-tis",
                    "--advantage-estimator gspo",
                    "--rollout-temperature 0.8",
                    "--keep-logits",
                    *UNREAD,
                    *UNREAD_OF_SAMPLING,
                )
            ),
        ],
    ),
    "reward_model_data_is_of_its_loss": (
        [
            "--n-samples-per-prompt 4 --prompt-data {dir}/several.jsonl",
            f"{SCORED} --label-key score",
            f"{SCORED} --label-key score --eval-interval 2 --eval-prompt-data rest {{dir}}/scored.jsonl",
        ],
        [
            (
                f"{SCORED} --label-key score --eval-interval 2 --eval-prompt-data rest {{dir}}/scored.jsonl"
                " --eval-temperature 0",
                "--eval-temperature has no effect on the evaluation of held-out scores: leave it out.",
            ),
            (
                "--n-samples-per-prompt 1",
                "--n-samples-per-prompt 1 leaves no rejected answer: give 1 and the number of rejected answers of a"
                " row.",
            ),
            (
                "--n-samples-per-prompt 4 --prompt-data {dir}/several.jsonl --micro-batch-size 2",
                "--micro-batch-size 2 divides groups of 4, whose 4 samples are in one forward pass: give a multiple of"
                " 4, or --use-dynamic-batch-size.",
            ),
            (
                "--reward-model-loss mse --n-samples-per-prompt 1 --label-key label --prompt-data {dir}/labelled.jsonl",
                "--reward-model-loss mse needs rows of a conversation and its score: give --rollout-function-path"
                f" {SFT}, or a function of your own.",
            ),
            (SCORED, "--reward-model-loss mse needs the column of the scores: give --label-key."),
            (
                f"{SCORED} --label-key score --n-samples-per-prompt 2",
                "--n-samples-per-prompt 2 repeats each scored conversation: give 1.",
            ),
        ],
    ),
}


@pytest.fixture
def reward_model(pairs, recipe):
    """A command line that trains a reward model; flags are appended to it."""
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = {
        "margins": {"prompt": "1+1", "chosen": "2", "rejected": "3", "margin": 1.5},
        "several": {"prompt": "1+1", "chosen": "2", "rejected": ["3", "4", "5"]},
        "labelled": {"prompt": "1+1", "chosen": "2", "rejected": "3", "label": 1},
        "scored": {"messages": messages, "score": 0.5, "label": 1},
    }
    for name, row in rows.items():
        (recipe.dir / f"{name}.jsonl").write_text(json.dumps(row) + "\n")

    def line(more: str) -> list[str]:
        return [word.replace("preference_loss", "reward_model_loss") for word in pairs(more)]

    return line


@pytest.mark.parametrize("more", [more for good, _ in CASES.values() for more in good])
def test_valid_flags_are_accepted(reward_model, more):
    assert [str(problem) for problem in read_args(reward_model(more))[1]] == []


@pytest.mark.parametrize(("more", "sentence"), [case for _, bad in CASES.values() for case in bad])
def test_each_violation_is_one_error(reward_model, recipe, more, sentence):
    assert [str(problem) for problem in read_args(reward_model(more))[1]] == [sentence.format(dir=recipe.dir)]


def test_engines_cannot_serve_what_is_trained(reward_model):
    line = without(reward_model("--rollout-max-response-len 8"), "--debug-train-only", keep=False)
    problems = [str(problem) for problem in read_args(line)[1]]
    assert any(problem.startswith(f"{LOSS} trains a model that engines cannot generate with") for problem in problems)


@pytest.mark.parametrize("more", ["--spec examples.model layers"])
def test_what_builds_a_policy_is_unsupported(reward_model, more):
    flag = more.split()[0]
    problems = [str(problem) for problem in read_args(reward_model(more))[1]]
    assert any(problem.startswith(f"{flag} ") and f"is unsupported with {LOSS}" in problem for problem in problems)


def test_flags_of_a_reward_model_are_rejected_with_a_policy_loss(recipe):
    problems = [str(problem) for problem in read_args(recipe.line("--margin-key margin"))[1]]
    assert problems == [f"--margin-key belongs to {LOSS}: add it, or leave --margin-key out."]


def test_group_is_the_preferred_response_and_the_rejected_ones(reward_model):
    args, problems = read_args(reward_model("--n-samples-per-prompt 4 --prompt-data {dir}/several.jsonl"))
    assert problems == [] and args.samples_together == 4 and not args.use_reference
    args, problems = read_args(reward_model(f"{SCORED} --label-key score"))
    assert problems == [] and args.samples_together == 1


@pytest.mark.parametrize(
    ("architecture", "served"),
    [("Qwen3ForCausalLM", True), ("Qwen3MoeForCausalLM", True), ("Glm4ForCausalLM", False)],
)
def test_classifier_that_no_server_has_is_named_at_the_start(reward_model, recipe, architecture, served):
    config = json.loads((recipe.dir / "hf/config.json").read_text())
    (recipe.dir / "hf/config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    args, _ = read_args(reward_model(""))
    notes = [note for note in args.notes if "this reward model is exported as a" in note]
    assert len(notes) == (not served)
    assert all("a Glm4ForSequenceClassification, which --rm-model does not serve" in note for note in notes)


@pytest.mark.parametrize(
    ("row", "more", "reason"),
    [
        ({"margin": "much"}, "--margin-key margin", "'margin' (--margin-key) is 'much' and must be a finite number"),
        ({"margin": True}, "--margin-key margin", "'margin' (--margin-key) is True and must be a finite number"),
        ({"rejected": ["3", "4"]}, "--n-samples-per-prompt 4", "'rejected' has 2 rejected answers and"),
        ({"rejected": "3"}, "--n-samples-per-prompt 4", "'rejected' has 1 rejected answer and"),
        ({"rejected": ["3", "4", "3"]}, "--n-samples-per-prompt 4", "'rejected' has the same answer twice"),
        ({"rejected": ["3", "2", "4"]}, "--n-samples-per-prompt 4", "'chosen' and 'rejected' are equal"),
        ({"rejected": ["3", "", "4"]}, "--n-samples-per-prompt 4", "an empty column 'rejected'"),
    ],
)
def test_bad_row_is_rejected_with_file_and_line(reward_model, recipe, row, more, reason):
    first = {"prompt": "1+1", "chosen": "2", "rejected": "3", "margin": 0.5}
    (recipe.dir / "bad.jsonl").write_text(json.dumps(first | row) + "\n")
    (problem,) = [str(one) for one in read_args(reward_model(f"{more} --prompt-data {{dir}}/bad.jsonl"))[1]]
    assert f"{recipe.dir}/bad.jsonl:1" in problem and reason in problem


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["1+1=", ""], "message 1 is the assistant's and is empty, so that its end alone would be trained on"),
        (["1+1=", " ", "2+2=", "4"], "message 1 is the assistant's and is empty"),
        (["1+1=", "2", "2+2="], "the conversation does not end with a message of the assistant, which the score is of"),
    ],
)
def test_conversation_without_an_answer_is_rejected_with_file_and_line(reward_model, recipe, turns, reason):
    roles = ("user", "assistant") * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    (recipe.dir / "bad.jsonl").write_text(json.dumps({"messages": messages, "score": 1}) + "\n")
    more = f"{SCORED} --label-key score".replace("scored.jsonl", "bad.jsonl")
    (problem,) = [str(one) for one in read_args(reward_model(more))[1]]
    assert f"{recipe.dir}/bad.jsonl:1: " in problem and reason in problem
    empty = {"role": "assistant", "content": "", "step_loss_mask": 0}  # not trained on
    (recipe.dir / "bad.jsonl").write_text(json.dumps({"messages": [messages[0], empty], "score": 1}) + "\n")
    (problem,) = [str(one) for one in read_args(reward_model(more))[1]]
    assert f"{recipe.dir}/bad.jsonl:1: no message of the assistant is trained on: remove the row" in problem
    answer = {"role": "assistant", "content": "2"}
    rows = {"messages": [messages[0], empty, messages[0], answer], "score": 1}
    (recipe.dir / "bad.jsonl").write_text(json.dumps(rows) + "\n")
    assert read_args(reward_model(more))[1] == []


def test_score_that_is_no_number_is_rejected_with_file_and_line(reward_model, recipe):
    row = json.loads((recipe.dir / "scored.jsonl").read_text()) | {"score": "nan"}
    (recipe.dir / "bad.jsonl").write_text(json.dumps(row) + "\n")
    more = f"{SCORED} --label-key score".replace("scored.jsonl", "bad.jsonl")
    (problem,) = [str(one) for one in read_args(reward_model(more))[1]]
    assert f"{recipe.dir}/bad.jsonl:1" in problem and "'score' (--label-key) is 'nan' and must be" in problem
