"""Rules about draft models: speculative decoding in the servers of a run, or of a group of --sglang-config.

A draft model proposes tokens that the server's own model accepts or replaces. It is beside that model in the same
servers and frozen: weight updates are for the policy alone. The rules follow SGLang 0.5.20.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.engine_groups import DRAFT_ALGORITHM, DRAFT_PATH, draft_folder, flag_of_groups, group_flags
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.models.hf_folder import same_vocabulary, weights_fault

_FLAG, _FOLDER_FLAG = "--sglang-speculative-algorithm", "--sglang-speculative-draft-model-path"
_NO_MODEL = ("NGRAM", "UNO")  # they propose tokens of the text so far, or by the served model itself
_NEED_MODEL = ("STANDALONE", "EAGLE3", "DFLASH", "DSPARK")
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def _algorithm(args: Arguments) -> str | None:
    """The algorithm of engines that are all alike; the rules are applied to each group by itself."""
    given = None if args.server_models or args.debug_train_only else args.sglang_options.get(DRAFT_ALGORITHM)
    return None if given is None else str(given).upper()


def draft_models_can_be_served(args: Arguments, context: Context) -> Iterator[Problem]:
    """A draft model has an algorithm that uses it, a folder with weights, the model's vocabulary, and one stage."""
    algorithm, given = _algorithm(args), args.sglang_options.get(DRAFT_PATH)
    if algorithm is None:
        if given is not None and not args.server_models and DRAFT_ALGORITHM not in args.sglang_options:
            yield Problem(
                _FOLDER_FLAG,
                f"{_FOLDER_FLAG} {given} has no effect without {_FLAG}: add it (STANDALONE for a whole language model),"
                " or leave the folder out.",
            )
        return
    if given is None and algorithm in _NEED_MODEL:
        yield Problem(_FLAG, f"{_FLAG} {algorithm} needs a draft model: give its folder, {_FOLDER_FLAG}.")
    if given is not None and algorithm in _NO_MODEL:
        yield Problem(_FLAG, f"{_FLAG} {algorithm} has no draft model: leave {_FOLDER_FLAG} {given} out.")
    elif given is not None and (fault := _fault(args, algorithm, Path(given))) is not None:
        yield Problem(_FOLDER_FLAG, f"{_FOLDER_FLAG} {given} {fault}.")
    if (stages := int(args.sglang_options.get("pp_size", 1))) > 1:
        yield Problem(_FLAG, f"{_FLAG} {algorithm} excludes --sglang-pp-size {stages}: leave one of them out.")


def _fault(args: Arguments, algorithm: str, folder: Path) -> str | None:
    """Completes "<flag> <folder> ..." if the folder holds no draft model for the model of these engines."""
    if not folder.is_dir():
        return f"{absent(folder)}: give the Hugging Face folder of the draft model"
    if not (folder / "config.json").is_file():
        return "has no config.json: give a Hugging Face folder"
    if not args.dry_run and (fault := weights_fault(folder)) is not None:
        return fault
    if algorithm != "STANDALONE" or args.hf_checkpoint is None:  # the others are made for one model
        return None
    own, others = (_vocabulary(Path(path)) for path in (folder, args.hf_checkpoint))
    if own is not None and others is not None and own != others:
        return (
            f"has a vocabulary of {own} tokens and the model {args.hf_checkpoint} one of {others}: give a draft model"
            " of the same family"
        )
    if same_vocabulary(folder, Path(args.hf_checkpoint)) is False:
        return (
            f"gives tokens other ids than the model {args.hf_checkpoint} (tokenizer.json): give a draft model of the"
            " same family"
        )
    return None


def _vocabulary(folder: Path) -> int | None:
    try:
        size = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def drafts_are_accepted_by_their_probability(args: Arguments, context: Context) -> Iterator[Problem]:
    """The policy's servers sample every token as without drafts: training takes the tokens for the policy's own."""
    for name in _THRESHOLDS if _algorithm(args) is not None else ():
        value = args.sglang_options.get(name, 1.0)
        if float(value) < 1:
            flag = "--sglang-" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {value} accepts drafts more often than the policy samples them, and training takes them for"
                " the policy's: leave it out.",
            )


def roles_have_one_draft_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prefill and decode servers of a model have one draft model, whose cache goes with that of the model."""
    for model in args.server_models:
        options = [group_flags(args, model, group).sglang_options for group in model.groups if group.servers]
        found = sorted({str(draft_folder(one) or one.get(DRAFT_ALGORITHM, "none")) for one in options})
        if model.disaggregated and len(found) > 1:
            flag, value = flag_of_groups(args)
            yield Problem(
                flag,
                f"{flag} {value}: model {model.name} has prefill and decode groups with the draft models"
                f" {' and '.join(found)}, and the cache of a draft model moves with that of the model: give all of them"
                " one.",
            )
