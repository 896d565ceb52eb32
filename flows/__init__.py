"""What runs where and when, by Prefect. Joins tba (tensors, dataclasses) and storage (Arrow tables)."""
