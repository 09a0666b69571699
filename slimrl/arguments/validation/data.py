"""Rules about prompt data and batch sizes: files have usable rows, and training uses every generated sample.

Prompts come from files, folders, mixtures of them, or custom functions. Samples divide evenly into optimizer steps,
data parallel ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

from slimrl.arguments.eval_datasets import eval_prompt_format, training_prompt_format
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.data.loss_mask import CHAT_TEMPLATE, fitting_types
from slimrl.data.preflight import FilePreview, preview_file
from slimrl.data.prompt_format import DATA_KINDS, DataMix, DataPath, PromptFormat, needs_label
from slimrl.models.hf_folder import read_chat_template, read_tokenizer_files

_SECONDS = 0.8  # time limit of the check of all data

_FILES = 50  # checked files per folder

# the flag, or the key of a set's entry, by the column that it names
Names = dict[str, str]
_OF_TRAINING = {"input": "--input-key", "label": "--label-key"}
_OF_EVALUATION = {"input": "--eval-input-key", "label": "--eval-label-key"}
_OF_CONFIG = {"input": "input_key of the set", "label": "label_key of the set"}


@dataclasses.dataclass(frozen=True)
class _DataSet:
    """One data set: its flag, the paths of its files, the format of its rows, and the number of allowed bad rows."""

    flag: str
    note: str
    paths: tuple[str, ...]
    form: PromptFormat
    names: Names
    allowed: int


def data_files_exist(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prompt and evaluation data can be opened, and the checked rows are usable."""
    sets: list[_DataSet] = []
    if args.prompt_data is not None:
        form = training_prompt_format(args)
        try:
            mix = DataMix.parse(args.prompt_data)
            groups = [mix.paths] if mix.probabilities is None else [(path,) for path in mix.paths]
            allowed = sys.maxsize if args.has_custom_data_source or args.eval_only else args.max_bad_rows
            sets += [_DataSet("--prompt-data", "", paths, form, _OF_TRAINING, allowed) for paths in groups]
        except ValueError as error:
            yield Problem("--prompt-data", f"--prompt-data {error}.")
    flag, names = ("--eval-prompt-data", _OF_EVALUATION) if args.eval_config is None else ("--eval-config", _OF_CONFIG)
    for dataset in args.eval_datasets:
        form = eval_prompt_format(args, dataset)
        sets.append(_DataSet(flag, f" (set {dataset.name})", (dataset.path,), form, names, 0))
    paths = sum(len(one.paths) for one in sets)
    seen: dict[str, list[FilePreview]] = {}  # the parts of a mixture are one set
    for one in sets:
        looks = yield from _set_problems(one, seconds=_SECONDS * len(one.paths) / paths)
        seen.setdefault(f"{one.flag}{one.note}", []).extend(looks)
    for where, looks in seen.items():
        yield from _label_problems(where, looks)


def labels_have_a_column(args: Arguments, context: Context) -> Iterator[Problem]:
    """A reward that compares with the label has a label column."""
    if args.prompt_data is None or args.has_custom_data_source or {"label_key", "rm_type"} & context.broken:
        return  # a custom data source labels its samples itself
    form = training_prompt_format(args)
    if form.label_key is None and form.reward_rule is not None and needs_label(form.reward_rule):
        yield Problem(
            "--label-key",
            f"--rm-type {args.rm_type} compares with the true answer, and no column of --prompt-data is set for it:"
            " give --label-key.",
        )


def prompts_have_one_source(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prompts come from --prompt-data or from custom functions, not both."""
    off = "--disable-rollout-global-dataset"
    if args.rollout_global_dataset or args.eval_only:
        return
    if args.prompt_data is not None and not args.has_custom_data_source:
        yield Problem(off, f"{off} leaves --prompt-data unread: leave one of the two out.")
    elif not (args.has_custom_data_source or args.has_custom_rollout_function or args.custom_generate_function_path):
        yield Problem(
            off,
            f"{off} supplies blank samples, and no function fills them: give --data-source-path,"
            " --custom-generate-function-path or --rollout-function-path.",
        )


def templates_have_their_fields(args: Arguments, context: Context) -> Iterator[Problem]:
    """A text template has each field once and real line breaks, and no other flag says the same."""
    for flag, template, fields in (
        ("--input-template", args.input_template, ("{}",)),
        ("--rm-input-template", args.rm_input_template, ("{prompt}", "{response}")),
    ):
        if template is None:
            continue
        for field in fields:
            if (count := template.count(field)) != 1:
                yield Problem(flag, f"{flag} {template!r} has {count} times {field}: write it once.")
        if "\\n" in template:
            yield Problem(
                flag,
                f"{flag} {template!r} has a backslash and an n, not a line break: write $'...' around it in the shell.",
            )
    if args.input_template is not None:
        for other, value, given in (
            ("--apply-chat-template", "", args.apply_chat_template),
            ("--rollout-function-path", f" {args.rollout_function_path}", args.reads_pairs),
            ("--loss-type", f" {args.loss_type}", args.loss_type == "sft_loss"),
        ):
            if given:
                yield Problem(
                    "--input-template",
                    f"--input-template has no effect with {other}{value}, which forms the prompt itself: leave one"
                    " out.",
                )
    if args.rm_input_template is not None and args.rm_input is not None:
        yield Problem(
            "--rm-input-template",
            f"--rm-input-template is a form of input of its own, and --rm-input {args.rm_input} another: leave one"
            " out.",
        )
    if args.rm_input_template is not None and (args.rm_model is None or args.has_served_teacher):
        yield Problem(
            "--rm-input-template",
            "--rm-input-template belongs to a reward model, and there is none: give --rm-type reward_model and"
            " --rm-model, or leave it out.",
        )


def truncated_prompts_have_a_limit(args: Arguments, context: Context) -> Iterator[Problem]:
    """--rollout-truncate-prompt has a length to cut to, and keeps what the chat template puts at the end."""
    cut = args.rollout_truncate_prompt
    if cut is None or "rollout_truncate_prompt" in context.broken:
        return
    flag = f"--rollout-truncate-prompt {cut}"
    if training_prompt_format(args).max_prompt_len is None:
        yield Problem(
            "--rollout-truncate-prompt", f"{flag} has no length to cut prompts to: give --rollout-max-prompt-len."
        )
    if cut == "right" and args.apply_chat_template:
        yield Problem(
            "--rollout-truncate-prompt",
            f"{flag} would cut off the end of the chat template, where the response begins: give left or middle.",
        )
    for other, given in (
        ("--refuse-long-prompts", args.refuse_long_prompts),
        (f"--rollout-function-path {args.rollout_function_path}", args.reads_pairs),
        (f"--loss-type {args.loss_type}", args.loss_type == "sft_loss"),
    ):
        if given:
            yield Problem("--rollout-truncate-prompt", f"{flag} has no effect with {other}: leave one of the two out.")


def loss_mask_type_fits_the_chat_template(args: Arguments, context: Context) -> Iterator[Problem]:
    """The assistant's turns are found in the chat template of a local --hf-checkpoint, if training renders messages."""
    folder = Path(args.hf_checkpoint or "")
    if args.hf_checkpoint is None or not (folder / "config.json").is_file() or "loss_mask_type" in context.broken:
        return
    if args.eval_only or not (args.reads_conversations or (args.reads_pairs and _pairs_are_messages(args))):
        return
    template = args.apply_chat_template_kwargs.get("chat_template") or read_chat_template(folder)
    if template is None:
        # a tokenizer in Python may have its own; another rule reports an unreadable one
        if not any(folder.glob("tokenization_*.py")) and read_tokenizer_files(folder).fault is None:
            yield Problem(
                "--hf-checkpoint",
                f"--hf-checkpoint {folder} has no chat template for the messages of --prompt-data: copy the model's"
                " chat_template.jinja there.",
            )
        return
    fitting = fitting_types(template)
    if args.loss_mask_type not in fitting:
        fix = f"give {' or '.join(fitting) or f'{CHAT_TEMPLATE}, and mark them in it with {{% generation %}}'}"
        yield Problem(
            "--loss-mask-type",
            f"--loss-mask-type {args.loss_mask_type} does not find the assistant's turns by the chat template of"
            f" --hf-checkpoint {folder}: {fix}.",
        )


def _pairs_are_messages(args: Arguments) -> bool:
    """Whether the first row of --prompt-data is of messages; False if it cannot be read."""
    try:
        files: list[Path] = []
        _path_complaint(DataPath.parse(DataMix.parse(args.prompt_data or []).paths[0]).path, files)
        return preview_file(files[0], slice(0, 1), training_prompt_format(args), seconds=_SECONDS).messages
    except (OSError, ValueError, IndexError):
        return False  # another rule reports it


def _set_problems(one: _DataSet, *, seconds: float) -> Generator[Problem, None, list[FilePreview]]:
    """The problems of a set's paths, or else of its rows; returns what was seen of whole files."""
    looks: list[FilePreview] = []
    for text in one.paths:
        files: list[Path] = []
        try:
            wanted = DataPath.parse(text)
        except ValueError:
            sentence = f"{one.flag} {text}{one.note} has a slice that cannot be read: write path@[start:end]."
            yield Problem(one.flag, sentence)
            return []
        complaint = _path_complaint(wanted.path, files)
        if complaint is not None:
            yield Problem(one.flag, f"{one.flag} {wanted.path}{one.note} {complaint}.")
            return []
        # finding the files of a slice over several files would need counting all rows: read only one row of each
        sliced = len(files) > 1 and wanted.rows != slice(None)
        rows = slice(0, 1) if sliced else wanted.rows
        seen: list[FilePreview] = []
        for file in files[:_FILES]:
            try:
                look = preview_file(file, rows, one.form, seconds=seconds / len(files[:_FILES]))
            except (OSError, ValueError) as error:
                yield Problem(one.flag, f"{one.flag} {file}{one.note} cannot be read: {error}.")
                return []
            seen.append(look)
            if sliced:
                continue
            lacking = list(_column_problems(one, file, look))
            yield from lacking
            if lacking:
                return []
            looks.append(look)
        if len(seen) == len(files) and not any(look.rows or look.ended_early for look in seen):
            what = "rows" if wanted.rows == slice(None) else "rows in this slice"
            yield Problem(one.flag, f"{one.flag} {text}{one.note} has no {what}: give at least one row.")
            return []
    yield from _row_problems(one, looks)
    return looks


def _path_complaint(path: Path, files: list[Path]) -> str | None:
    """The problem of a path, None if there is none; appends its files to `files`."""
    kinds = " nor ".join(DATA_KINDS)
    if path.is_dir():
        files += sorted(file for file in path.iterdir() if file.suffix in DATA_KINDS)
        return None if files else f"is a folder without {kinds} files: check the path"
    if not path.is_file():
        return f"{absent(path, 'file')}: check the path"
    if path.suffix not in DATA_KINDS:
        return f"is neither {kinds}: convert it to one of them"
    files.append(path)
    return None


def _column_problems(one: _DataSet, path: Path, look: FilePreview) -> Iterator[Problem]:
    """A wrong column name is wrong in every row, so the columns of the first row are reported."""
    # a Parquet file has the same columns in every row
    if look.columns is None or (len(look.bad) <= one.allowed and path.suffix != ".parquet"):
        return
    spelled = dict(zip(_OF_TRAINING.values(), one.names.values(), strict=True))
    for column, flag in one.form.required.items():
        name = spelled.get(flag, flag)
        if column not in look.columns:
            yield Problem(
                one.flag,
                f"{one.flag} {path}{one.note} has no column {column!r} ({name}) but"
                f" {', '.join(map(repr, look.columns))}: set {name} to one of them.",
            )


def _row_problems(one: _DataSet, looks: list[FilePreview]) -> Iterator[Problem]:
    bad = [row for look in looks for row in look.bad]
    if len(bad) <= one.allowed:
        return
    count = "a bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
    rows = sum(look.rows for look in looks)
    limit = f", and --max-bad-rows is {one.allowed}" if one.allowed else ""
    fix = "fix it" if len(bad) == 1 else "fix them"
    if one.flag == "--prompt-data":
        fix += ", or allow for bad rows with --max-bad-rows"
    where = bad[0]
    for of_training, name in zip(_OF_TRAINING.values(), one.names.values(), strict=True):
        where = where.replace(f"({of_training})", f"({name})")
    first = "" if len(bad) == 1 else "the first "
    yield Problem(
        one.flag,
        f"{one.flag} {' '.join(one.paths)}{one.note} has {count} among the {rows:,} looked at{limit}; {first}{where}:"
        f" {fix}.",
    )


def _label_problems(where: str, looks: list[FilePreview]) -> Iterator[Problem]:
    """Labelled answers are of both kinds, unless a part of the rows was not looked at."""
    labels = {label for look in looks for label in look.labels}
    rows = sum(look.rows for look in looks)
    if len(labels) == 1 and rows > 1 and not any(look.ended_early or look.bad for look in looks):
        (only,) = labels
        lacking = "undesirable" if only else "desirable"
        yield Problem(
            where.split()[0],
            f"{where} has the label {str(only).lower()} in all {rows:,} rows looked at: add {lacking} answers.",
        )


_BATCH_FIELDS = {"rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"}


def rollout_samples_equal_trained_samples(args: Arguments, context: Context) -> Iterator[Problem]:
    """rollout batch x samples per prompt = global batch x steps per rollout."""
    if args.rollout_batch_size is None or context.broken & _BATCH_FIELDS:
        return
    produced = args.prompts_trained_per_rollout * args.n_samples_per_prompt
    consumed = args.global_batch_size * args.num_steps_per_rollout
    if produced == consumed:
        return
    part = args.load_debug_rollout_data_subsample
    of_them = "" if part is None else f" x --load-debug-rollout-data-subsample {part:g}"
    made = (
        f"--rollout-batch-size {args.rollout_batch_size}{of_them} x --n-samples-per-prompt {args.n_samples_per_prompt}"
        f" = {produced} samples"
    )
    if "global_batch_size" not in context.given:
        yield Problem(
            "--num-steps-per-rollout",
            f"{made}, which --num-steps-per-rollout {args.num_steps_per_rollout} does not divide: choose a divisor.",
        )
    elif "num_steps_per_rollout" not in context.given:
        yield Problem(
            "--global-batch-size",
            f"{made}, which --global-batch-size {args.global_batch_size} does not divide: choose a divisor.",
        )
    else:
        yield Problem(
            "--global-batch-size",
            f"{made}, but training takes --global-batch-size {args.global_batch_size} x --num-steps-per-rollout"
            f" {args.num_steps_per_rollout} = {consumed}: make the two products equal.",
        )


def how_batch_misses(args: Arguments, ranks: int) -> str | None:
    """How --global-batch-size misses equal parts for `ranks` data-parallel ranks, with the fix; None if it gives them.

    Each rank gets whole micro-batches, with virtual stages whole groups of them. A dynamic micro-batch may have any
    number of samples, but at least one.
    """
    batch = args.global_batch_size or 0
    group = (args.microbatch_group_size_per_vp_stage or 1) if args.virtual_pipeline_model_parallel_size else 1
    sizes = {f"data parallel size {ranks}": ranks}
    grouped = sizes | ({f"{group} micro-batches of a virtual stage": group} if group > 1 else {})
    if not args.use_dynamic_batch_size:
        sizes = grouped | {f"--micro-batch-size {args.micro_batch_size}": args.micro_batch_size}
    for used, verb, fix in ((sizes, "divide by", "a multiple of"), (grouped, "fill", "at least")):
        unit = math.prod(used.values())
        if batch % unit if used is sizes else batch < unit:
            shown = " x ".join(used) + (f" = {unit}" if len(used) > 1 else "")
            return f"does not {verb} {shown}: choose {fix} {unit}"
    return None


def global_batch_divides_over_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every data parallel rank gets whole micro-batches (whole samples with dynamic batches)."""
    if any(rollout_samples_equal_trained_samples(args, context)):
        return  # the global batch itself may be wrong
    relevant = _BATCH_FIELDS | {"micro_batch_size", "actor_num_nodes", "actor_num_gpus_per_node"}
    if not args.global_batch_size or context.broken & relevant or args.debug_rollout_only:
        return
    missed = how_batch_misses(args, args.data_parallel_size)
    if missed is not None:
        yield Problem("--global-batch-size", f"--global-batch-size {args.global_batch_size} {missed}.")


def dynamic_batches_have_a_cap(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-dynamic-batch-size and --max-tokens-per-gpu need each other."""
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None and "max_tokens_per_gpu" not in context.broken:
        yield Problem(
            "--max-tokens-per-gpu",
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: give the maximum tokens of a forward pass.",
        )
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        yield Problem(
            "--max-tokens-per-gpu",
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} caps dynamic batches only: add --use-dynamic-batch-size,"
            " or leave it out.",
        )


def dynamic_batches_have_no_fixed_size(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-dynamic-batch-size and --micro-batch-size exclude each other."""
    if args.use_dynamic_batch_size and "micro_batch_size" in context.given:
        yield Problem(
            "--micro-batch-size",
            f"--micro-batch-size {args.micro_batch_size} is a fixed number of samples and --use-dynamic-batch-size"
            " fills each forward pass by --max-tokens-per-gpu: leave one of the two out.",
        )
