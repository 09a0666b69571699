"""Ray reads its access token when it is imported."""

from slimrl.cluster.ray_environment import prepare_ray_environment

prepare_ray_environment()
