"""Contents of a Hugging Face folder: its tensors by the safetensors headers, its tokenizer files, its missing weights.

Reads text files and headers only, never tensors, and needs neither torch nor transformers. A header is JSON after eight
bytes of length (little endian), so counting gigabytes of weights takes milliseconds.

Used by the validation of --hf-checkpoint and by the dry run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\blayers\.(\d+)\.")
# scales of quantised weights and frequencies of older files are not parameters; MTP layers are not trained
_NOT_COUNTED = re.compile(r"_scale(_inv)?$|inv_freq$|\bmtp")
# formats that pack several weights into one number: elements cannot be compared
_PACKED = re.compile(r"qweight$|_packed$|qzeros$")


class UnreadableFileError(ValueError):
    """A safetensors file with an invalid header, or an invalid index."""


@dataclasses.dataclass(frozen=True)
class HfFiles:
    """Contents of the folder. `elements` counts weights of the layers that are trained; None if they are packed."""

    files: int
    tensors: int
    bytes: int
    elements: int | None
    missing: tuple[str, ...]  # files of the index that do not exist


def read_hf_files(folder: Path, *, layers: int, tied: bool) -> HfFiles | None:
    """Count the safetensors files in `folder`; None if it has none (only config.json and the tokenizer).

    `layers` and `tied` describe the model: further layers (multi-token prediction) and the second copy of a tied
    embedding are not counted as elements. Raises UnreadableFileError naming a broken file.
    """
    names = _names(folder)
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        return None
    entries = {name: entry for file in present for name, entry in _entries(folder / file)}
    packed = any(_PACKED.search(name) for name in entries)
    counted = [
        math.prod(entry["shape"]) for name, entry in entries.items() if _is_counted(name, layers=layers, tied=tied)
    ]
    return HfFiles(
        files=len(present),
        tensors=len(entries),
        bytes=sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()),
        elements=None if packed else sum(counted),
        missing=tuple(name for name in names if name not in present),
    )


def read_tensor_names(folder: Path) -> set[str]:
    """The names of all tensors in the safetensors files of `folder`; raises UnreadableFileError naming a broken one."""
    present = [folder / name for name in _names(folder) if (folder / name).is_file()]
    return {name for path in present for name, _ in _entries(path)}


def bytes_per_weight(folder: Path, files: HfFiles | None, parameters: int) -> float:
    """Bytes per weight in an engine: those of the files; without files 1 in fp8, else 2."""
    if files is not None and not files.missing:
        return files.bytes / parameters
    config = json.loads((folder / "config.json").read_text())
    return 1.0 if (config.get("quantization_config") or {}).get("quant_method") == "fp8" else 2.0


def _names(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFileError(f"{index} is not an index of weights ({error!r}): copy the model again") from error
    check_inside(index, weight_map)
    return sorted(set(weight_map.values()))


def check_inside(index: Path, weight_map: Mapping[str, Any]) -> None:
    """Raises UnreadableFileError, naming the tensor, for an index that names a file outside its folder."""
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise UnreadableFileError(
                f"{index} says that {tensor} is in {file!r}, which is not in its folder: files outside are not read;"
                " copy the model again from its source, or name the file without a path"
            )


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise UnreadableFileError(f"{path} is truncated or not a safetensors file: copy it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise UnreadableFileError(f"{path} has a header that is not JSON ({error}): copy it again") from error
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if 8 + length + end > path.stat().st_size:
        raise UnreadableFileError(f"{path} is truncated, its header declares {end} bytes of tensors: copy it again")
    yield from entries.items()


def _is_counted(name: str, *, layers: int, tied: bool) -> bool:
    if _NOT_COUNTED.search(name) or (tied and name == "lm_head.weight"):
        return False
    layer = _LAYER.search(name)
    return layer is None or int(layer.group(1)) < layers


# one of these files has the vocabulary; a tokenizer that is Python code may use any file name
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_OTHER_VOCABULARIES = ("tokenization_*.py", "*.tiktoken", "tiktoken.model", "*.bpe.model")
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
)
_TORCH_WEIGHTS = ("*.bin", "*.pt", "*.pth")
_LFS_POINTER = b"version https://git-lfs"
_ALL_LAYERS = 10**6


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """`fault` completes "--hf-checkpoint <folder> ..."; None if the tokenizer exists and can be read.

    `tokens` is the largest token id plus 1, `source` the file that has it; None if no file has it.
    """

    fault: str | None
    tokens: int | None = None
    source: str | None = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Checks the tokenizer's files; a vocabulary of 150,000 tokens takes about a tenth of a second."""
    present = [name for name in _VOCABULARIES if (folder / name).is_file()]
    if not present and not any(any(folder.glob(pattern)) for pattern in _OTHER_VOCABULARIES):
        return TokenizerFiles(f"has no tokenizer (none of {', '.join(_VOCABULARIES)}): copy its files there too")
    contents: dict[str, Any] = {}
    for name in dict.fromkeys((*present, *_JSON_FILES)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            return TokenizerFiles(f"has a {name} that cannot be read ({error.strerror}): check its owner")
        if (fault := _fault(name, data, contents)) is not None:
            return TokenizerFiles(fault)
    return TokenizerFiles(None, *_tokens(contents))


def read_chat_template(folder: Path) -> str | None:
    """The source of the tokenizer's chat template, of several the one named default; None if there is none."""
    try:
        if (own := folder / "chat_template.jinja").is_file():
            return own.read_text(encoding="utf-8")
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}["default"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def weights_fault(folder: Path) -> str | None:
    """Completes "--hf-checkpoint <folder> ..." if weights are missing; None if they are complete."""
    try:
        files = read_hf_files(folder, layers=_ALL_LAYERS, tied=False)
    except UnreadableFileError as error:
        return f"is not whole: {error}"
    if files is None:
        index_without_files = any(folder.glob("*.safetensors.index.json"))
        if index_without_files or not any(any(folder.glob(pattern)) for pattern in _TORCH_WEIGHTS):
            return "has no weights (no .safetensors file), which the engines load: copy them there too"
        return None
    if files.missing:
        more = f" and {len(files.missing) - 1} more files" if len(files.missing) > 1 else ""
        return f"is incomplete, its index names {files.missing[0]}{more} that do not exist: copy the model again"
    return None


def _fault(name: str, data: bytes, contents: dict[str, Any]) -> str | None:
    """The error of a file, or None; puts its parsed content into `contents`."""
    if data.startswith(_LFS_POINTER):
        return f"has a Git LFS pointer in place of its {name}: fetch the files (git lfs pull)"
    if not data:
        return f"has an empty {name}: copy the model again"
    if not name.endswith(".json"):
        return None
    try:
        contents[name] = json.loads(data)
    except ValueError as error:
        return f"has a {name} that is not JSON ({error}): copy the model again"
    if not isinstance(contents[name], dict):
        return f"has a {name} that is not a JSON object: copy the model again"
    if name == "tokenizer.json" and not isinstance(contents[name].get("model"), dict):
        return "has a tokenizer.json without a model: copy the model again"
    return None


def _tokens(contents: dict[str, Any]) -> tuple[int | None, str | None]:
    """The largest token id plus 1, and the file that has the vocabulary."""
    if "tokenizer.json" in contents:
        source, added = "tokenizer.json", contents["tokenizer.json"].get("added_tokens") or []
        vocabulary = contents["tokenizer.json"]["model"].get("vocab")
        ids = [entry.get("id") for entry in added if isinstance(entry, dict)]
    else:
        source, vocabulary = "vocab.json", contents.get("vocab.json")
        ids = list((contents.get("added_tokens.json") or {}).values())
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):  # unigram models number their pieces by position
        ids.append(len(vocabulary) - 1)
    else:
        return None, None
    numbers = [number for number in ids if isinstance(number, int)]
    return (max(numbers) + 1, source) if numbers else (None, None)


def same_vocabulary(first: Path, second: Path) -> bool | None:
    """Whether the tokenizer.json of both folders give every token the same id; None if one of them cannot be read."""
    contents = []
    for folder in (first, second):
        try:
            contents.append((folder / "tokenizer.json").read_bytes())
        except OSError:
            return None
    if contents[0] == contents[1]:
        return True
    try:
        one, other = (_ids(json.loads(content)) for content in contents)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return one == other


def _ids(content: dict[str, Any]) -> dict[str, int]:
    """The id of each token of a tokenizer.json; pieces of unigram models are numbered by position."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
