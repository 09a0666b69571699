"""Where a tool wants a Hugging Face folder, a model id (`org/name`) does too: it is downloaded to the hub's cache."""

from __future__ import annotations

import re
from pathlib import Path

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# weights as safetensors, and what a tokenizer and a config are made of
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.md", "LICENSE*"]


def local_hf_folder(flag: str, value: str | Path) -> Path:
    """`value` where it exists, else the folder into which the model of that id was downloaded.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE hold, as for every program of Hugging Face. Raises
    FileNotFoundError naming `flag` where there is neither a folder nor such a model within reach.
    """
    folder = Path(value)
    if folder.exists():
        return folder
    if not _MODEL_ID.fullmatch(str(value)):
        raise FileNotFoundError(
            f"{flag} {value} does not exist: give the folder of a Hugging Face model, or a model id like Qwen/Qwen3-4B"
        )
    # imported here: it takes a moment, and most runs name a folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(str(value), allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{flag} {value} is no folder here, and the model of that id could not be downloaded ({reason}): check the"
            " spelling and the network, or give a folder"
        ) from error
