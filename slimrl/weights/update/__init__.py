"""Megatron shards to every engine, under a new weight version."""
