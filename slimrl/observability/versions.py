"""Which versions of which packages a run used; read from the installed metadata, nothing heavy is imported."""

from __future__ import annotations

import platform
from importlib import metadata

from slimrl import __version__

_PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "sglang-router",
    "ray",
    "transformers",
    "transformer-engine",
    "numpy",
    "safetensors",
)


def package_versions() -> dict[str, str]:
    """Distribution name -> version, slimrl and Python first; packages that are not installed are left out."""
    versions = {"slimrl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
