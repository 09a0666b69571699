"""Weight updates from trainer shards straight to engine shards (--update-weight-transfer-mode p2p)."""
