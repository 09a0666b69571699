"""Training with megatron-core. The import of megatron-core within this package is kept short, see `lean_import`."""

from slimrl.megatron import lean_import

lean_import.install()
