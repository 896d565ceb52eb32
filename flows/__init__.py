"""The Prefect flows: where and when each process runs. Joins tba (tensors, dataclasses) and storage (Arrow tables)."""
