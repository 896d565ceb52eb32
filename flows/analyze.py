"""analyze/diversity: measures the diversity of runs' responses and stores it, on request or on a schedule."""

from prefect import flow, get_run_logger, task

from flows.config import StoreUrl
from flows.report import diversity
from storage.store import RunStore


@flow(name="analyze")
def analyze(
    store: StoreUrl,
    runs: list[str],
    sample: int = diversity.SAMPLE,
    embedded: int = diversity.EMBEDDED,
    success_reward: float | None = None,
) -> None:
    """Measures the runs with equal settings and stores each run's values with it, as `tba diversity` does.

    sample: number of responses of each run to measure; embedded: number of these to embed, 0: none, which is needed
    where the encoder's package is missing; success_reward: smallest reward of a success; None: that of
    the run's task.
    """
    if not runs:
        raise ValueError("runs: got an empty list; name at least one run")
    measure([RunStore(store, run) for run in dict.fromkeys(runs)], sample, embedded, success_reward)


@task(persist_result=False)
def measure(stores: list[RunStore], sample: int, embedded: int, success_reward: float | None) -> None:
    found = diversity.measure_runs(stores, sample=sample, embedded=embedded, success_reward=success_reward)
    diversity.store_runs(stores, found)
    for run, rows in found.items():
        for row in rows:
            if row["grouping"] == "run":
                get_run_logger().info("run %s: %s %s", run, row["metric"], diversity.shown(row))
