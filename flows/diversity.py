"""analyze/diversity: how different a run's responses are, measured and stored. On request, or on a schedule."""

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows import measures
from storage.store import RunStore


@flow(name="analyze", flow_run_name="{runs}")
def analyze(
    store: str, runs: list[str], sample: int = measures.SAMPLE, embedded: int = measures.EMBEDDED
) -> dict[str, list[dict]]:
    """Measures each run alike and stores what it finds; returns each run's values as a whole.

    sample: responses to measure; embedded: how many of them are embedded (0: none).
    """
    stores = [RunStore(store, run) for run in runs]
    m = min(map(measures.usual_responses_per_prompt, stores))
    return {run_store.run: measure(run_store, sample, embedded, m) for run_store in stores}


@task(task_run_name="{store.run}", cache_policy=NO_CACHE, persist_result=False)
def measure(store: RunStore, sample: int, embedded: int, responses_per_prompt: int) -> list[dict]:
    """Measures and stores one run's diversity; returns the rows of the run as a whole."""
    rows = measures.measure_diversity(
        store, sample=sample, embedded=embedded, responses_per_prompt=responses_per_prompt
    )
    measures.record(store, rows)
    whole = [row for row in rows if row["grouping"] == "run"]
    for row in whole:
        get_run_logger().info("%s: %s", row["metric"], measures.shown(row))
    return whole
