"""Ray reads its access token when it is imported."""

import os

from slimrl.processes.ray_environment import prepare_ray_environment

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # clusters of the tests may have several nodes
prepare_ray_environment()
