"""Checkpoint folders, by names and file sizes only: complete or damaged, their writer, and where a run starts.

Shared by the validation rules, the dry run and the trainer. Imports no torch and reads no tensors. `find` and
`start_of` expect checked flags, so that what these name exists, and choose the same checkpoint as the trainer's own
search (`slimrl.megatron.checkpoint.folder`).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slimrl.arguments.flags.kernels import PrecisionArguments
from slimrl.arguments.namespace import Arguments
from slimrl.models.families import TABLES
from slimrl.models.model_spec import expand_layer_pattern

TRACKER_NAME = "latest_checkpointed_iteration.txt"
MANIFEST_NAME = "slimrl_checkpoint.json"  # written last into each checkpoint: its files and their bytes
RELEASE = "release"
CRITIC = "critic"  # the folder of the critic's checkpoints in that of the policy's
UNFINISHED = ".tmp"  # ends the name of a checkpoint that is being written, or being deleted
REPLACED = ".old"  # ends the name of a whole one while another takes its place
_PROGRAM = "slimrl"
_ALWAYS = ("metadata.json", ".metadata")  # in every torch_dist checkpoint


def folder_name(iteration: int | None) -> str:
    """`iter_0000012` for 12, `release` for None."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """12 for `iter_0000012`, None for any other name."""
    return int(name[5:]) if name.startswith("iter_") and name[5:].isdigit() and len(name) == 12 else None


def placed(root: Path, name: str) -> Path | None:
    """The folder of the checkpoint `name`, or its `.old` folder if a kill interrupted its replacement; else None."""
    for path in (root / name, root / (name + REPLACED)):
        if path.is_dir():
            return path
    return None


def manifest(iteration: int | None, files: dict[str, int], **more: Any) -> str:
    """The text of the manifest: `files` are names and bytes, `more` describes the model; no iteration: converted."""
    content = {"program": _PROGRAM, "iteration": iteration, **more, "files": dict(sorted(files.items()))}
    return json.dumps(content, indent=2) + "\n"


SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")  # of the model, in the manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The parsed manifest; None if it is missing or truncated."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("program") == _PROGRAM else None


def is_ours(folder: Path) -> bool:
    """True for a checkpoint of training that slimrl wrote under this name."""
    written, iteration = read_manifest(folder), iteration_of(folder.name)
    return written is not None and iteration is not None and written["iteration"] == iteration


def find_corruption(folder: Path) -> str | None:
    """Why the checkpoint `folder` is corrupt; None if no problem is found.

    With a manifest every file must have its bytes; without one (another program's) the files that no torch_dist
    checkpoint lacks must be there.
    """
    written = read_manifest(folder)
    if written is None:
        if (folder / MANIFEST_NAME).exists():
            return f"its {MANIFEST_NAME} is truncated or not slimrl's"
        lacking = next((name for name in _ALWAYS if not (folder / name).is_file()), None)
        return None if lacking is None else f"it is no torch_dist checkpoint, or an incomplete one: it has no {lacking}"
    for name, size in written["files"].items():
        path = folder / name
        if not path.is_file():
            return f"it is incomplete: {name} is missing"
        if path.stat().st_size != size:
            return f"it is incomplete: {name} has {path.stat().st_size} bytes of {size}"
    return None


def is_hf_model(folder: Path) -> bool:
    """True for the folder of a Hugging Face model with its weights, False for a checkpoint of training."""
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and (folder / "config.json").is_file() and not (folder / TRACKER_NAME).is_file()


_COMPLETE = "metadata.json"


@dataclasses.dataclass(frozen=True)
class Found:
    """One checkpoint; `iteration` is the last rollout it was trained on, None for a converted model."""

    folder: Path
    iteration: int | None

    @property
    def name(self) -> str:
        """What it is, in words."""
        return "weights to start from" if self.iteration is None else f"after rollout {self.iteration}"


@dataclasses.dataclass(frozen=True)
class ResumePlan:
    """Where the weights come from and with which rollout the run begins.

    `resumed` is True if optimizer and random state continue too; `reference` is None where no reference is needed;
    `load` is --load as given.
    """

    weights: Found | None
    flag: str
    reference: Found | None
    first_rollout: int
    resumed: bool
    load: str | None
    teacher: Found | None = None  # of --opd-type megatron
    reference_flag: str = "--ref-load"  # --load after an update of the reference (--ref-update-interval)

    @property
    def sentence(self) -> str:
        """Where the run begins, for its log."""
        assert self.weights is not None  # checked flags name some
        if self.resumed:
            return f"resuming from {self.weights.folder} with rollout {self.first_rollout}"
        source = f"a fresh start from {self.flag} {self.weights.folder}, with rollout {self.first_rollout}"
        if self.flag == "--load" or self.load is None:
            return source
        return f"--load {self.load} has no checkpoint yet: {source}"


def find(folder: str | None, step: int | None) -> Found | None:
    """The checkpoint in `folder`: iteration `step`, or the one that its tracker file names; None for a fresh folder."""
    if folder is None:
        return None
    root = Path(folder)
    if (root / _COMPLETE).is_file():
        return Found(root, iteration_of(root.name.removesuffix(REPLACED)))
    if is_hf_model(root):
        return Found(root, None)
    if step is None:
        tracker = root / TRACKER_NAME
        if not tracker.is_file():
            return None
        name = tracker.read_text().strip()
        step = None if name == "release" else int(name)
    return Found(placed(root, folder_name(step)) or root / folder_name(step), step)


def last_reference_update(first_rollout: int, interval: int | None) -> int | None:
    """The rollout after which --ref-update-interval last changed the reference, before `first_rollout`; else None."""
    if interval is None or first_rollout < interval:
        return None
    return first_rollout // interval * interval - 1


def start_of(args: Arguments) -> ResumePlan:
    """The start of a run, from checked flags: --load if it has a checkpoint, else --ref-load."""
    reference = find(args.ref_load, args.ref_ckpt_step)
    loaded = find(args.load, args.ckpt_step)
    trained = None if loaded is None or args.finetune else loaded.iteration
    resumed, first = trained is not None, 0 if trained is None else trained + 1
    update = last_reference_update(first, args.ref_update_interval)
    if update is not None and loaded is not None:
        root = loaded.folder.parent
        reference = Found(placed(root, folder_name(update)) or root / folder_name(update), update)
    return ResumePlan(
        weights=loaded or reference,
        flag="--ref-load" if loaded is None else "--load",
        reference=reference if args.use_reference and not args.eval_only else None,
        first_rollout=first if args.start_rollout_id is None else args.start_rollout_id,
        resumed=resumed,
        load=args.load,
        teacher=find(args.opd_teacher_load, args.opd_teacher_ckpt_step) if args.has_megatron_teacher else None,
        reference_flag="--ref-load" if update is None else "--load",
    )


def updated_reference(args: Arguments) -> Path | None:
    """The checkpoint whose weights are the reference of a run that --load continues; None if that is --ref-load."""
    try:
        start = start_of(args)
    except (OSError, ValueError):  # a rule about --load reports it
        return None
    return None if start.reference is None or start.reference_flag == "--ref-load" else start.reference.folder


# of the number formats those that only change gradients, and the layout of memory
_NOT_IN_A_FORWARD_PASS = {
    *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis", "fp8_wgrad"),
    *("keep_fp8_transpose_cache", "tp_only_amax_red", "reuse_grad_buf_for_mxfp8_param_ag"),
}
# besides the number formats and what config.json says of the network
_IN_A_FORWARD_PASS = (
    *("rollout_temperature", "normalization", "apply_layernorm_1p", "softmax_scale", "attention_softmax_in_fp32"),
    *("apply_query_key_layer_scaling", "moe_router_dtype", "moe_apply_probs_on_input", "moe_latent_size"),
    *("spec", "custom_model_provider_path", "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path"),
)


def forward_settings(args: Arguments) -> dict[str, Any]:
    """The flags on which the log-probabilities of given weights depend by more than rounding, by field.

    No flag of the layout, the batches or the kernels is among them.
    """
    network = {field for table in TABLES.values() for field in table.rows}
    formats = {field.name for field in dataclasses.fields(PrecisionArguments)} - _NOT_IN_A_FORWARD_PASS
    values = {name: vars(args)[name] for name in sorted(network | formats | {*_IN_A_FORWARD_PASS})}
    if args.num_layers is not None:  # a pattern has two notations
        values["moe_layer_freq"] = expand_layer_pattern(args.moe_layer_freq, args.num_layers)
    return values


def critic_base(args: Arguments) -> Found:
    """The model that a critic's adapters are beside: that of --critic-load, else of --ref-load.

    A --critic-load that is also --critic-save has adapters. Raises FileNotFoundError without a model.
    """
    own = args.critic_load is not None and args.critic_load != args.critic_save
    found = find(args.critic_load, None) if own else find(args.ref_load, args.ref_ckpt_step)
    if found is None:
        raise FileNotFoundError(
            f"--critic-lora-rank {args.critic_lora_rank} adapts the model of --critic-load, else of --ref-load, and"
            f" {f'{args.critic_load} has no weights' if own else 'neither has weights'}: give one of them"
        )
    return found


def critic_start(args: Arguments, resumed: int | None) -> Found:
    """The weights that the critic starts from; `resumed` is the iteration at which the policy resumes, else None.

    A resumed run continues with the critic of the same iteration, in --critic-save, beside --load or in --critic-load.
    A new one starts from --critic-load; without it, or while it is an empty --critic-save, from the policy's weights.
    Raises FileNotFoundError if there is none.
    """
    if resumed is None:
        if args.critic_lora_rank is not None:
            return critic_base(args)
        own = find(args.critic_load, None)
        is_fresh = args.critic_load is None or (own is None and args.critic_load == args.critic_save)
        weights = start_of(args).weights if is_fresh else own
        if weights is None:
            raise FileNotFoundError(f"--critic-load {args.critic_load} has no weights: give a folder that has some")
        return weights
    assert args.load is not None  # it has the policy's checkpoint
    load = Path(args.load)
    beside = (load.parent if iteration_of(load.name) is not None else load) / CRITIC
    roots = [*(Path(root) for root in (args.critic_save,) if root is not None), beside]
    roots += [Path(root) for root in (args.critic_load,) if root is not None]
    for root in roots:
        if (path := placed(root, folder_name(resumed))) is not None:
            return Found(path, resumed)
    raise FileNotFoundError(
        f"--load {args.load} continues after rollout {resumed}, and there is no critic of that rollout in"
        f" {' or '.join(dict.fromkeys(map(str, roots)))}: give the folder of its checkpoints as --critic-load; or, for"
        " a policy that had no critic, --finetune, which starts anew from its weights with a new critic"
    )
