"""Rules about training on pairs: a command line that passes, and each violation with its one error."""

from __future__ import annotations

import dataclasses
import json

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.checkpoints import forward_settings
from slimrl.arguments.namespace import Context
from slimrl.arguments.validation.preference import precomputed_reference_is_usable
from slimrl.data.reference_log_probs import ReferenceIdentity, claim

ROLLOUT = "slimrl.rollout.preference_rollout.generate_rollout"
# removed from the recipe, whose estimator and rewards a preference loss does not have
REMOVED = (
    "--advantage-estimator",
    "--use-kl-loss",
    "--kl-loss-coef",
    "--kl-loss-type",
    "--kl-coef",
    "--entropy-coef",
    "--eps-clip",
    "--eps-clip-high",
    "--eval-interval",
    "--eval-prompt-data",
    "--n-samples-per-eval-prompt",
    "--eval-max-response-len",
    "--eval-top-p",
    "--label-key",
    "--rm-type",
    "--rollout-max-response-len",
    "--rollout-temperature",
)
PAIRS = f"--loss-type preference_loss --rollout-function-path {ROLLOUT} --n-samples-per-prompt 2 --debug-train-only"
KTO = "--preference-loss kto --n-samples-per-prompt 1"
LABELS = {  # rows of labelled answers, by the name of their file
    "both": (True, False),
    "good": (True, True),
    "bad": (False, False),
    "numbers": (True, 1),
    "lacking": (True, None),
}
UNREAD = (
    "--disable-rewards-normalization",
    "--disable-grpo-std-normalization",
    "--kl-loss-type k3",
    "--get-mismatch-metrics",
    "--use-rollout-entropy",
)
UNREAD_OF_SAMPLING = (  # of a rollout function that samples nothing
    "--check-weight-update-equal",
    "--partial-rollout",
    "--over-sampling-batch-size 64",
    "--buffer-filter-path slimrl.rollout.filter_hub.buffer_filters.pop_first",
    "--log-passrate",
    "--group-rm --custom-rm-path examples.reward.shortest_wins",
    "--reward-key score",
    "--rm-num-graders 2",
    "--rollout-top-p 0.9",
    "--rollout-top-k 20",
    "--rollout-stop x",
)
HELD_OUT = "--eval-interval 5 --eval-prompt-data held-out {dir}/pairs.jsonl"

# rule -> (flags that pass when appended to a line that trains on pairs, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "preference_flags_have_their_loss": (
        [
            "--preference-beta 0.5 --preference-label-smoothing 0.1 --preference-nll-coef 0.2",
            "--preference-loss robust --preference-label-smoothing 0.1",
            "--preference-loss simpo --simpo-gamma 0.5",
            "--preference-loss ipo --preference-reference-free",
            "--chosen-key chosen --rejected-key rejected",
            "--preference-loss kto --desirable-weight 1.5 --undesirable-weight 0",
        ],
        [
            ("--simpo-gamma 0.5", "--simpo-gamma has no effect with --preference-loss sigmoid: leave it out."),
            (
                "--preference-loss hinge --preference-label-smoothing 0.1",
                "--preference-label-smoothing has no effect with --preference-loss hinge: leave it out.",
            ),
            (
                "--preference-loss orpo --preference-reference-free",
                "--preference-reference-free has no effect with --preference-loss orpo: leave it out.",
            ),
            (
                "--preference-label-smoothing 0.5",
                "--preference-label-smoothing 0.5 says that half of the pairs or more are exchanged: give less than"
                " 0.5, or exchange the columns.",
            ),
            ("--desirable-weight 2", "--desirable-weight has no effect with --preference-loss sigmoid: leave it out."),
            (
                "--preference-loss kto --preference-nll-coef 0.1",
                "--preference-nll-coef has no effect with --preference-loss kto: leave it out.",
            ),
            (
                "--preference-loss kto --preference-reference-free",
                "--preference-reference-free has no effect with --preference-loss kto: leave it out.",
            ),
            (
                "--preference-loss kto --desirable-weight 0 --undesirable-weight 0",
                "--desirable-weight and --undesirable-weight are both 0: give one of them above 0.",
            ),
            (
                "--completion-key answer",
                "--completion-key belongs to --preference-loss kto or apo_zero_unpaired with --n-samples-per-prompt 1:"
                " add them, or leave --completion-key out.",
            ),
            ("--preference-beta 0", "--preference-beta 0 is too small: it must be above 0."),
            (
                "--preference-loss dpo",
                "--preference-loss dpo is not sigmoid, sigmoid_norm, robust, hinge, ipo, simpo, orpo, kto or"
                " apo_zero_unpaired: give sigmoid, which is the loss of DPO.",
            ),
            (
                "--chosen-key preferred",
                "--prompt-data {dir}/pairs.jsonl has no column 'preferred' (--chosen-key) but 'prompt', 'chosen',"
                " 'rejected': set --chosen-key to one of them.",
            ),
        ],
    ),
    "precomputed_reference_is_usable": (
        [
            "--precompute-ref-log-probs {dir}/new",
            "--precompute-ref-log-probs {dir}/ours",
            "--preference-loss ipo --precompute-ref-log-probs {dir}/empty --preference-beta 0.2",
            f"{KTO.replace('kto', 'apo_zero_unpaired')} --prompt-data {{dir}}/both.jsonl"
            " --precompute-ref-log-probs {dir}/new",
        ],
        [
            *(
                (
                    f"--preference-loss {name} --precompute-ref-log-probs {{dir}}/new",
                    f"--precompute-ref-log-probs {{dir}}/new has no effect with --preference-loss {name}, which has no"
                    " reference: leave it out.",
                )
                for name in ("simpo", "orpo")
            ),
            (
                "--preference-reference-free --precompute-ref-log-probs {dir}/new",
                "--precompute-ref-log-probs {dir}/new has no effect with --preference-reference-free: leave one of them"
                " out.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/both.jsonl --precompute-ref-log-probs {{dir}}/new",
                "--precompute-ref-log-probs {dir}/new is unsupported with --preference-loss kto, whose KL estimate"
                " needs the reference on prompts with the answers of others, which change with the order of the data:"
                " leave it out.",
            ),
            (
                "--precompute-ref-log-probs {dir}/pairs.jsonl",
                "--precompute-ref-log-probs {dir}/pairs.jsonl cannot be a folder, {dir}/pairs.jsonl is a file: choose"
                " another path.",
            ),
            (
                "--precompute-ref-log-probs {dir}/other",
                "--precompute-ref-log-probs {dir}/other has notes.txt and no reference.json: give an empty or a new"
                " folder.",
            ),
            (
                "--precompute-ref-log-probs {dir}/cut",
                "--precompute-ref-log-probs {dir}/cut has a damaged reference.json (its format is 1): remove the"
                " folder, or give another one.",
            ),
            (
                "--bf16 --precompute-ref-log-probs {dir}/ours",
                "--precompute-ref-log-probs {dir}/ours has log-probabilities that were computed with other settings"
                " (bf16 is false there and true here): give the same ones, or another folder.",
            ),
        ],
    ),
    "preference_training_is_consistent": (
        ["--custom-megatron-before-log-prob-hook-path examples.training.check_weights", HELD_OUT],
        [
            *(
                (flag, f"{flag.split()[0]} has no effect with --loss-type preference_loss: leave it out.")
                for flag in (
                    "--use-kl-loss",
                    "--kl-coef 0.1",
                    "--entropy-coef 0.1",
                    "--use-tis",
                    "--use-opsm",
                    "--use-rollout-logprobs",
                    "--normalize-advantages",
                    "--calculate-per-token-loss",
                    "--rollout-max-prompt-len 100",
                    "--positive-example-loss-coef 0.1",
                    "--advantage-estimator gspo",
                    "--eps-clip 0.1",
                    *UNREAD,
                    *UNREAD_OF_SAMPLING,
                )
            ),
            (
                "--loss-type sft_loss",
                f"--rollout-function-path {ROLLOUT} makes pairs of a preferred and a rejected answer, and --loss-type"
                " sft_loss trains on single samples: give --loss-type preference_loss or reward_model_loss.",
            ),
            (
                f"{HELD_OUT} --eval-temperature 0.5",
                "--eval-temperature has no effect on the evaluation of held-out pairs: leave it out.",
            ),
            (
                "--eval-interval 5 --eval-prompt-data half {dir}/half.jsonl --eval-input-key prompt",
                "--eval-prompt-data {dir}/half.jsonl (set half) has no column 'rejected' (--rejected-key) but 'prompt',"
                " 'chosen': set --rejected-key to one of them.",
            ),
        ],
    ),
    "likelihoods_of_given_responses_are_not_scaled": (
        ["--rollout-temperature 1"],
        [
            (
                "--rollout-temperature 0.8",
                "--rollout-temperature 0.8 also divides the logits of training, which changes the loss of --loss-type"
                " preference_loss: give 1, or leave it out.",
            ),
        ],
    ),
    "pairs_are_whole": (
        [
            "--micro-batch-size 2",
            "--num-steps-per-rollout 4",
            "--micro-batch-size 4",
            "--n-samples-per-prompt 4 --prompt-data {dir}/several.jsonl",
        ],
        [
            (
                "--n-samples-per-prompt 1",
                "--n-samples-per-prompt 1 leaves no rejected answer: give 2, or 1 and the number of rejected answers of"
                " a row.",
            ),
            (
                "--n-samples-per-prompt 4",
                "--prompt-data {dir}/pairs.jsonl has a bad row among the 1 looked at; {dir}/pairs.jsonl:1: 'rejected'"
                " has 1 rejected answer and --n-samples-per-prompt 4 needs a list of 3: fix it, or allow for bad"
                " rows with --max-bad-rows.",
            ),
            (
                "--micro-batch-size 1",
                "--micro-batch-size 1 divides pairs, whose two samples are in one forward pass: give an even number,"
                " or --use-dynamic-batch-size.",
            ),
            (
                "--num-steps-per-rollout 16",
                "--global-batch-size 4 does not give every one of 4 data-parallel ranks whole pairs: choose a multiple"
                " of 8.",
            ),
        ],
    ),
    "kl_estimate_has_another_prompt": (
        [
            f"{KTO} --prompt-data {{dir}}/both.jsonl --label-key label",
            f"{KTO} --prompt-data {{dir}}/good.jsonl=0.5 {{dir}}/bad.jsonl=0.5",
            f"{KTO} --prompt-data {{dir}}/both.jsonl --eval-interval 5 --eval-prompt-data held-out {{dir}}/both.jsonl"
            " --eval-input-key prompt",
            f"{KTO.replace('kto', 'apo_zero_unpaired')} --prompt-data {{dir}}/both.jsonl",
            "--preference-loss kto --n-samples-per-prompt 2",
        ],
        [
            (
                "--preference-loss kto --n-samples-per-prompt 1 --prompt-data {dir}/both.jsonl --label-key good",
                "--prompt-data {dir}/both.jsonl has no column 'good' (--label-key) but 'prompt', 'completion',"
                " 'label': set --label-key to one of them.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/both.jsonl --chosen-key completion",
                "--chosen-key belongs to pairs, and with --n-samples-per-prompt 1 a row is an answer with its label:"
                " leave --chosen-key out, or give --n-samples-per-prompt 2.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/both.jsonl --completion-key answer",
                "--prompt-data {dir}/both.jsonl has no column 'answer' (--completion-key) but 'prompt', 'completion',"
                " 'label': set --completion-key to one of them.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/numbers.jsonl",
                "--prompt-data {dir}/numbers.jsonl has a bad row among the 2 looked at; {dir}/numbers.jsonl:2: 'label'"
                " (--label-key) is 1 and must be true (desirable) or false: fix it, or allow for bad rows with"
                " --max-bad-rows.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/lacking.jsonl",
                "--prompt-data {dir}/lacking.jsonl has a bad row among the 2 looked at; {dir}/lacking.jsonl:2: no"
                " column 'label' (--label-key); it has ['completion', 'prompt']: fix it, or allow for bad rows with"
                " --max-bad-rows.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/good.jsonl",
                "--prompt-data has the label true in all 2 rows looked at: add undesirable answers.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/both.jsonl --eval-interval 5 --eval-prompt-data held-out"
                " {dir}/bad.jsonl --eval-input-key prompt",
                "--eval-prompt-data (set held-out) has the label false in all 2 rows looked at: add desirable answers.",
            ),
            (
                f"{KTO} --prompt-data {{dir}}/both.jsonl --num-steps-per-rollout 1 --rollout-batch-size 1"
                " --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2",
                "--global-batch-size 1 does not give every optimizer step at least two whole groups of"
                " --n-samples-per-prompt 1, and the KL estimate of --preference-loss kto follows each prompt by the"
                " response of another group: choose a multiple of 1, at least 2.",
            ),
        ],
    ),
}


@pytest.fixture
def pairs(recipe):
    """A command line that trains on pairs; flags are appended to it."""
    row = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    (recipe.dir / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    several = {"prompt": "1+1", "chosen": "2", "rejected": ["3", "4", "5"]}
    (recipe.dir / "several.jsonl").write_text(json.dumps(several) + "\n")
    for name, labels in LABELS.items():
        rows = [{"prompt": "1+1", "completion": f"{label}", "label": label} for label in labels]
        rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
        (recipe.dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (recipe.dir / "half.jsonl").write_text(json.dumps({"prompt": "1+1", "chosen": "2"}) + "\n")

    for name, text in (("other/notes.txt", "mine"), ("cut/reference.json", '{"format": 1}')):
        (recipe.dir / name).parent.mkdir()
        (recipe.dir / name).write_text(text)
    (recipe.dir / "empty").mkdir()

    def line(more: str) -> list[str]:
        found = recipe.line(f"{PAIRS} --prompt-data {{dir}}/pairs.jsonl {more}")
        static = "--micro-batch-size" in more
        for flag in [*REMOVED, *(["--use-dynamic-batch-size", "--max-tokens-per-gpu"] if static else [])]:
            found = without(found, flag, keep=flag in more)
        return found

    settings = forward_settings(read_args(line(""))[0])
    claim(recipe.dir / "ours", ReferenceIdentity("0", settings))
    return line


def without(line: list[str], flag: str, *, keep: bool) -> list[str]:
    """The line without the first occurrence of a flag; all later ones stay."""
    start = line.index(flag)
    if keep and line.count(flag) == 1:
        return line
    end = next((place for place in range(start + 1, len(line)) if line[place].startswith("--")), len(line))
    return line[:start] + line[end:]


@pytest.mark.parametrize("more", [more for good, _ in CASES.values() for more in good])
def test_valid_flags_are_accepted(pairs, more):
    assert [str(problem) for problem in read_args(pairs(more))[1]] == []


@pytest.mark.parametrize(("more", "sentence"), [case for _, bad in CASES.values() for case in bad])
def test_each_violation_is_one_error(pairs, recipe, more, sentence):
    assert [str(problem) for problem in read_args(pairs(more))[1]] == [sentence.format(dir=recipe.dir)]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--preference-loss ipo",
            "--preference-loss belongs to --loss-type preference_loss: add it, or leave --preference-loss out.",
        ),
        (
            "--precompute-ref-log-probs ref",
            "--precompute-ref-log-probs belongs to --loss-type preference_loss: add it, or leave"
            " --precompute-ref-log-probs out.",
        ),
        (
            "--rejected-key worse",
            f"--rejected-key belongs to --rollout-function-path {ROLLOUT}: add it, or leave --rejected-key out.",
        ),
    ],
)
def test_flags_of_pairs_are_rejected_with_a_policy_loss(recipe, more, sentence):
    assert [str(problem) for problem in read_args(recipe.line(more))[1]] == [sentence]


def test_precomputed_reference_needs_a_folder_that_can_be_written(pairs, recipe, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != recipe.dir / "empty")  # root may write everywhere
    for name, what in (("empty", "it"), ("empty/new", f"{recipe.dir}/empty, where it would be created,")):
        folder = recipe.dir / name
        assert [str(problem) for problem in read_args(pairs(f"--precompute-ref-log-probs {folder}"))[1]] == [
            f"--precompute-ref-log-probs {folder} cannot be used, {what} is not writable: give another folder."
        ]


def test_precomputed_reference_needs_samples_that_do_not_depend_on_each_other(pairs, recipe):
    args, _ = read_args(pairs("--precompute-ref-log-probs {dir}/new"))
    for name, what in (
        (
            "moe_expert_capacity_factor",
            "capacity-factor 1.5, by which the log-probabilities of a sample depend on the others of its micro-batch",
        ),
        ("moe_input_jitter_eps", "jitter-eps 1.5, by which every pass has other noise"),
    ):
        (problem,) = precomputed_reference_is_usable(dataclasses.replace(args, **{name: 1.5}), Context("train.py"))
        assert str(problem).startswith(f"--precompute-ref-log-probs {recipe.dir}/new is unsupported with --moe-")
        assert str(problem).endswith(f"{what}: leave one of them out.")


def test_settings_of_a_forward_pass_are_none_of_the_layout_or_the_loss(pairs):
    one, other, third = (
        forward_settings(read_args(pairs(more))[0])
        for more in (
            "",
            "--tensor-model-parallel-size 2 --preference-beta 0.5 --lr 1e-3 --micro-batch-size 2",
            "--bf16 --rotary-base 5000 --fp32-residual-connection",
        )
    )
    assert one == other
    assert {name for name in one if one[name] != third[name]} == {"bf16", "rotary_base", "fp32_residual_connection"}


def test_built_in_rollout_makes_no_pairs(pairs):
    default = "slimrl.rollout.sglang_rollout.generate_rollout"
    _, problems = read_args(pairs(f"--rollout-function-path {default} --rollout-max-response-len 8"))
    assert (
        "--loss-type preference_loss needs pairs, and the built-in rollout samples single responses: give"
        f" --rollout-function-path {ROLLOUT}, or a function that returns groups of the preferred and the rejected"
        " response."
    ) in [str(problem) for problem in problems]


def test_held_out_pairs_are_evaluated_without_engines_only(pairs):
    line = [word for word in pairs(f"{HELD_OUT} --rollout-max-response-len 8") if word != "--debug-train-only"]
    assert (
        "--eval-interval 5 evaluates held-out pairs in training, which needs --debug-train-only: add it, or give"
        " --eval-function-path for an evaluation by engines."
    ) in [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize(
    ("more", "beta", "reference"),
    [
        ("", 0.1, True),
        ("--preference-loss sigmoid_norm", 5.0, True),
        ("--preference-loss simpo", 2.0, False),
        ("--preference-loss simpo --preference-beta 3", 3.0, False),
        ("--preference-reference-free", 0.1, False),
    ],
)
def test_beta_and_reference_follow_from_the_loss(pairs, more, beta, reference):
    args, problems = read_args(pairs(more))
    assert problems == []
    assert (args.preference_beta, args.use_reference, args.samples_together) == (beta, reference, 2)
    assert not args.compute_advantages_and_returns


SFT = (
    "--loss-type sft_loss --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --n-samples-per-prompt 1"
    " --input-key messages --prompt-data {dir}/talks.jsonl --eval-interval 5 --eval-prompt-data held-out"
    " {dir}/talks.jsonl --eval-input-key messages"
)


@pytest.mark.parametrize(
    ("more", "sentences"),
    [
        ("", []),
        (
            "--eval-temperature 0.5",
            ["--eval-temperature has no effect on the evaluation of held-out conversations: leave it out."],
        ),
    ],
)
def test_held_out_conversations_are_evaluated_by_training(pairs, recipe, more, sentences):
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (recipe.dir / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    args, problems = read_args(pairs(f"{SFT} {more}"))
    assert [str(problem) for problem in problems] == sentences
    assert args.evaluates_held_out
