"""What a Hugging Face folder holds beside its config.json, as far as it can be told without torch and transformers.

Promises to read text files and headers only, never tensors. Called by the rules about --hf-checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slimrl.arguments.hf_files import UnreadableFileError, read_hf_files

# one of them has the vocabulary; a tokenizer that is Python code may call its file as it likes
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
    """`fault` completes "--hf-checkpoint <folder> ...", None where the tokenizer is there and can be read.

    `tokens` is the largest token id and one more, `source` the file that has it; None where no file says it.
    """

    fault: str | None
    tokens: int | None = None
    source: str | None = None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Looks at the tokenizer's files; a vocabulary of 150,000 tokens takes about a tenth of a second."""
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


def weights_fault(folder: Path) -> str | None:
    """What completes "--hf-checkpoint <folder> ..." where its weights are not all there; None where they are."""
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
        return f"is not complete, its index names {files.missing[0]}{more} that are not there: copy the model again"
    return None


def _fault(name: str, data: bytes, contents: dict[str, Any]) -> str | None:
    """What is wrong with a file; what it holds is put into `contents`."""
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
    """The largest token id and one more, and the file that has the vocabulary."""
    if "tokenizer.json" in contents:
        source, added = "tokenizer.json", contents["tokenizer.json"].get("added_tokens") or []
        vocabulary = contents["tokenizer.json"]["model"].get("vocab")
        ids = [entry.get("id") for entry in added if isinstance(entry, dict)]
    else:
        source, vocabulary = "vocab.json", contents.get("vocab.json")
        ids = list((contents.get("added_tokens.json") or {}).values())
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()
    elif isinstance(vocabulary, list):  # unigram models number their pieces by place
        ids.append(len(vocabulary) - 1)
    else:
        return None, None
    numbers = [number for number in ids if isinstance(number, int)]
    return (max(numbers) + 1, source) if numbers else (None, None)
