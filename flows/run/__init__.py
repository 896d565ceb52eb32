"""What surrounds a run: checks before it, its flow runs, its Searchers, Prefect's page of it."""
