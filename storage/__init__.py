"""Shards in, batches out: the object store, the replay buffer and the ledger. Imports neither flows nor tba."""
