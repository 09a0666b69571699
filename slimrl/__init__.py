"""slimrl: reinforcement-learning post-training for large language models.

Megatron-core trains, SGLang generates, Ray places both; the same code runs on a CPU-only laptop
with a tiny model and on a GPU cluster.
"""

from slimrl import renamed_modules

__version__ = "0.1.0"

renamed_modules.install()
