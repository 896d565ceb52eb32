"""The checks before a run, its flow runs, its Searchers, the watch over its Trainer, its view on Prefect's page."""
