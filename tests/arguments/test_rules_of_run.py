"""Rules about required flags, files and profiles of a run.

The recipe and its variants pass, each violation is one error.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args

# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "run_has_a_plain_name": (
        ["--run-name my-run_1.2", f"--run-name {'x' * 200}", "--run-name übung"],
        [
            (
                "--run-name ../../x",
                "--run-name ../../x is a path, and it is the name of a folder: give a plain name, such as my-run, and"
                " the folder above it with --runs-dir.",
            ),
            (
                "--run-name /tmp/x",
                "--run-name /tmp/x is a path, and it is the name of a folder: give a plain name, such as my-run, and"
                " the folder above it with --runs-dir.",
            ),
            (
                "--run-name a\\b",
                "--run-name a\\b is a path, and it is the name of a folder: give a plain name, such as my-run, and"
                " the folder above it with --runs-dir.",
            ),
            (
                "--run-name ..",
                "--run-name .. begins with a dot, and it is the name of a folder: give a plain name, such as my-run.",
            ),
            (
                f"--run-name {'x' * 201}",
                f"--run-name {'x' * 20}... has 201 bytes, more than 200, and it is the name of a folder: give a plain"
                f" name, such as my-run.",
            ),
            (
                "--run-name a\x1bb",
                "--run-name 'a\\x1bb' has non-printable characters or outer spaces, and it is the name of a folder:"
                " give a plain name, such as my-run.",
            ),
            (
                "--run-name=",
                "--run-name '' is empty, perhaps because of an unset variable: give a value, or leave it out.",
            ),
        ],
    ),
    "profiling_flags_have_their_switch": (
        [
            "--use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 1",
            "--record-memory-history --memory-snapshot-num-steps 1",
        ],
        [
            (
                "--profile-step-start 1",
                "--profile-step-start belongs to --use-pytorch-profiler: add it, or leave --profile-step-start out.",
            ),
            (
                "--memory-snapshot-dir {dir}",
                "--memory-snapshot-dir belongs to --record-memory-history: add it, or leave --memory-snapshot-dir out.",
            ),
        ],
    ),
    "profiler_has_something_to_profile": (
        [
            "--use-pytorch-profiler --profile-step-start 0 --profile-step-end 1"
            " --profile-target train_actor train_log_probs"
        ],
        [
            (
                "--use-pytorch-profiler --profile-step-start 3 --profile-step-end 3",
                "--profile-step-end 3 is not above --profile-step-start 3: no rollout would be profiled.",
            ),
            (
                "--use-pytorch-profiler --profile-step-end 4000 --profile-step-start 3500 --num-rollout 3500",
                "--profile-step-start 3500 is not below --num-rollout 3500: no rollout would be profiled; lower it.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --profile-ranks 0 99",
                "--profile-ranks 99: ranks are 0 to 7; correct them.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --profile-target train_overall train_actor",
                "--profile-target train_overall includes the other parts: give it alone, or the others without it.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --debug-rollout-only",
                "--use-pytorch-profiler profiles training and --debug-rollout-only has none: leave one out.",
            ),
        ],
    ),
    "memory_record_has_training": (
        ["--record-memory-history"],
        [
            (
                "--record-memory-history --debug-rollout-only",
                "--record-memory-history records training and --debug-rollout-only has none: leave one out.",
            )
        ],
    ),
    "recorded_rollouts_have_one_use": (
        [],
        [
            (
                "--load-debug-rollout-data-subsample 0.5 --rollout-batch-size 64",
                "--load-debug-rollout-data-subsample 0.5 needs recorded rollouts: give --load-debug-rollout-data too.",
            ),
        ],
    ),
    "ci_checks_have_their_switch": (
        [
            "--ci-test --ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold 0.01",
            "--ci-save-grad-norm {dir}/{{role}}_{{rollout_id}}_{{step_id}}.txt",
        ],
        [
            (
                "--ci-disable-kl-checker",
                "--ci-disable-kl-checker belongs to --ci-test: add it, or leave --ci-disable-kl-checker out.",
            ),
            (
                "--ci-save-grad-norm {dir}/{{rollout_id}}.txt",
                "--ci-save-grad-norm {dir}/{{rollout_id}}.txt is the same file for every optimizer step of a rollout:"
                " put {{step_id}} into the path.",
            ),
            (
                "--ci-save-grad-norm {dir}/{{rollout_id}}{{step_id}} --ci-load-grad-norm"
                " {dir}/{{rollout_id}}{{step_id}}",
                "--ci-load-grad-norm {dir}/{{rollout_id}}{{step_id}} is also --ci-save-grad-norm, which overwrites"
                " it: give another path.",
            ),
        ],
    ),
    "run_has_a_length": (["--num-epoch 2", "--num-rollout 0"], []),
    "values_are_supported": (
        ["--pipeline-model-parallel-size 1", "--update-weight-mode full"],
        [
            (
                "--distributed-backend gloo",
                "--distributed-backend gloo is unsupported: the backend follows from the machine; leave it out.",
            ),
            (
                "--memory-recorder memray",
                "--memory-recorder memray is unsupported: --record-memory-history records the GPU's memory with torch;"
                " leave it out.",
            ),
        ],
    ),
    "outputs_can_be_written": (
        ["--runs-dir {dir}/new/runs", "--load {dir}/new/ckpt --save {dir}/new/ckpt"],
        [
            (
                "--runs-dir {dir}/train.jsonl/runs",
                "--runs-dir {dir}/train.jsonl/runs cannot be a folder, {dir}/train.jsonl is a file: choose another"
                " path.",
            )
        ],
    ),
    "dump_templates_name_the_rollout": (
        [
            "--save-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl",
            "--save-debug-rollout-data {{run_dir}}/{{rollout_id}}.jsonl --save-debug-rollout-limit 3",
            "--dump-details {dir}/all --save-debug-rollout-limit 3",
        ],
        [
            (
                "--save-debug-rollout-limit 3",
                "--save-debug-rollout-limit 3 limits recorded rollouts, and none are recorded: give"
                " --save-debug-rollout-data, or leave it out.",
            ),
            (
                "--save-debug-rollout-data {dir}/dump.jsonl",
                "--save-debug-rollout-data {dir}/dump.jsonl is the same file for every rollout: put {{rollout_id}}"
                " into the path.",
            ),
            (
                "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl",
                "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl matches no file: check the path.",
            ),
        ],
    ),
    "reference_updates_are_usable": (
        [
            "--ref-update-interval 40",
            "--ref-update-interval 80 --save-retain-interval 40 --save-total-limit 2",
        ],
        [
            (
                "--ref-update-interval 30",
                "--ref-update-interval 30 is not a multiple of --save-interval 20: a resumed run would lack the"
                " checkpoint that has the reference. Give 40.",
            ),
            (
                "--ref-update-interval 40 --save-retain-interval 80",
                "--ref-update-interval 40 is not a multiple of --save-retain-interval 80: a resumed run would lack the"
                " checkpoint that has the reference. Give 80.",
            ),
            (
                "--ref-update-interval 40 --save-total-limit 2",
                "--ref-update-interval 40 needs the checkpoints that have the reference, and --save-total-limit 2"
                " deletes them: add --save-retain-interval 40.",
            ),
            (
                "--ref-update-interval 40 --start-rollout-id 7",
                "--ref-update-interval 40 excludes --start-rollout-id 7, which renumbers rollouts: leave one of them"
                " out.",
            ),
            (
                "--ref-update-interval 40 --lora-rank 8",
                "--ref-update-interval 40 excludes --lora-rank 8, whose reference is the model without adapters: leave"
                " one of them out.",
            ),
        ],
    ),
    "disk_transport_has_a_folder": (
        ["--update-weight-transport disk --update-weight-disk-dir {dir}/weights"],
        [
            (
                "--update-weight-transport disk",
                "--update-weight-transport disk needs --update-weight-disk-dir: give a folder.",
            ),
            (
                "--update-weight-disk-dir {dir}/weights",
                "--update-weight-disk-dir {dir}/weights is used by --update-weight-transport disk only: add it, or"
                " leave the folder out.",
            ),
        ],
    ),
}

# rules whose violation is a removed flag or another kind of folder: tested below, or in a separate file
TESTED_APART = {
    "model_flags_are_given",
    "training_flags_are_given",
    "saving_is_complete",
    "hf_models_agree",
    "saved_apart_from_a_model",
    "retention_fits_saving",
    "exports_have_a_place",
    "hf_checkpoint_exists",
    "weights_have_a_source",
    "ref_load_is_a_checkpoint",
    "load_is_a_checkpoint_or_new",
    "loaded_models_have_the_head",
    "checkpoints_have_the_sizes_of_the_model",
    "updated_reference_exists",
}


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == [sentence.format(dir=recipe.dir)]


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("--num-rollout", "the run has no length: give --num-rollout or --num-epoch."),
        ("--prompt-data", "--prompt-data is missing: every run needs it."),
        ("--rollout-batch-size", "--rollout-batch-size is missing: every run needs it."),
        ("--rollout-max-response-len", "--rollout-max-response-len is missing: every run needs it."),
        ("--hf-checkpoint", "--hf-checkpoint is missing: every run needs it."),
        ("--rm-type", "no reward for the responses: give --rm-type or --custom-rm-path."),
        (
            "--eval-prompt-data",
            "--eval-interval 5 has nothing to evaluate on: give --eval-prompt-data or --eval-config.",
        ),
        ("--save", "--save-interval 20 needs --save: give a folder."),
        (
            "--max-tokens-per-gpu",
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: give the maximum tokens of a forward pass.",
        ),
        (
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu 9216 caps dynamic batches only: add --use-dynamic-batch-size, or leave it out.",
        ),
        (
            "--colocate",
            "the engines have no GPUs: give --rollout-num-gpus (separate GPUs) or --colocate (shared GPUs).",
        ),
        (
            "--recompute-method",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers, for example uniform"
            " and 1.",
        ),
        (
            "--num-layers",
            "--num-layers missing: give the flags that describe the model, for example from scripts/models/.",
        ),
    ],
)
def test_removed_flag_is_one_error(recipe, without, sentence):
    _, problems = read_args(recipe.line(without=without))
    assert [str(problem) for problem in problems] == [sentence]


def test_flag_with_an_invalid_value_is_not_also_reported_as_missing(recipe):
    _, problems = read_args(recipe.line("--rollout-batch-size many", without="--rollout-batch-size"))
    assert [str(problem) for problem in problems] == ["--rollout-batch-size many is not a whole number."]


def test_recorded_rollouts_need_no_engines(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    line = recipe.line("--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl", without="--colocate")
    args, problems = read_args(line)
    assert problems == []
    assert args.debug_train_only
    _, problems = read_args([*line, "--debug-rollout-only"])
    assert [str(problem) for problem in problems] == [
        "--debug-train-only (implied by --load-debug-rollout-data) and --debug-rollout-only leave nothing to run:"
        " give one."
    ]


def test_recorded_rollouts_are_replayed_with_or_without_engines_fully_or_partly(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    dumps = "{dir}/dump_{{rollout_id}}.jsonl"
    args, problems = read_args(recipe.line(f"--load-forge-rollout-data {dumps}"))
    assert problems == [] and not args.debug_train_only
    assert args.replayed_rollouts == dumps.format(dir=recipe.dir)
    said = {
        f"--load-forge-rollout-data {dumps} --load-debug-rollout-data {dumps}": "--load-forge-rollout-data trains on"
        " recorded rollouts with engines running and --load-debug-rollout-data without: give one of them.",
        f"--load-forge-rollout-data {dumps} --debug-rollout-only": "--load-forge-rollout-data trains with engines and"
        " --debug-rollout-only leaves one side out: leave --debug-rollout-only out.",
        "--load-forge-rollout-data {dir}/none_{{rollout_id}}": "--load-forge-rollout-data {dir}/none_{{rollout_id}}"
        " matches no file: check the path.",
    }
    for more, sentence in said.items():
        assert [str(problem) for problem in read_args(recipe.line(more))[1]] == [sentence.format(dir=recipe.dir)]

    # a quarter of 32 groups of 8
    part = f"--load-debug-rollout-data {dumps} --load-debug-rollout-data-subsample 0.25"
    args, problems = read_args(recipe.line(part))
    assert problems == [] and (args.prompts_trained_per_rollout, args.global_batch_size) == (8, 64)
    _, problems = read_args(recipe.line(f"{part} --global-batch-size 256"))
    assert [str(problem) for problem in problems] == [
        "--rollout-batch-size 32 x --load-debug-rollout-data-subsample 0.25 x --n-samples-per-prompt 8 = 64 samples,"
        " but training takes --global-batch-size 256 x --num-steps-per-rollout 1 = 256: make the two products equal."
    ]


def test_details_share_one_folder_except_those_with_their_own_path(recipe):
    args, problems = read_args(recipe.line("--dump-details {dir}/all --save-debug-rollout-data {dir}/{{rollout_id}}"))
    assert problems == []
    assert args.save_debug_rollout_data == f"{recipe.dir}/{{rollout_id}}"
    assert args.save_debug_train_data == f"{recipe.dir}/all/train_data/{{rollout_id}}.pt"
    args, _ = read_args(recipe.line("--dump-details {dir}/all"))
    assert args.save_debug_rollout_data == f"{recipe.dir}/all/rollout_data/{{rollout_id}}.jsonl"
    same = "--save-debug-rollout-data {dir}/{{rollout_id}} --save-debug-train-data {dir}/{{rollout_id}}"
    assert [str(problem) for problem in read_args(recipe.line(same))[1]] == [
        f"--save-debug-train-data {recipe.dir}/{{rollout_id}} is also --save-debug-rollout-data, and one would"
        f" overwrite the other: give two paths."
    ]


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_config_json_that_is_not_an_object_is_rejected(recipe, content):
    (recipe.dir / "hf" / "config.json").write_text(content)
    _, problems = read_args(recipe.line())
    assert [str(problem) for problem in problems] == [
        f"--hf-checkpoint: {recipe.dir}/hf/config.json is not a JSON object: copy the model again."
    ]
