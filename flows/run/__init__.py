"""The checks before a run, its flow runs, its Searchers and its view on Prefect's page."""
