"""Weight updates: sends the trainer's Megatron shards to every engine under a new weight version."""
