"""Prints torch's information about this machine's GPUs as one line of JSON. Started by `machine.look`."""

from __future__ import annotations

import json
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """Versions, GPUs, and peer access between them."""
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "gpus": [],
    }
    if not torch.cuda.is_available():
        return found
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "free_bytes": torch.cuda.mem_get_info(index)[0],
                "capability": [properties.major, properties.minor],
                "multiprocessors": properties.multi_processor_count,
            }
        )
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["peer_access"] = [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
