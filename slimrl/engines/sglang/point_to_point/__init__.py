"""An engine rank's part of weight updates from trainer shards straight to engine shards."""
