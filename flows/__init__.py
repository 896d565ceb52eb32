"""The Prefect flows: where and when each process runs. Joins tba (tensors, dataclasses) and storage (Arrow tables)."""

import logging

from flows.report.text import PrintableMessages

for _name in ("prefect.flow_runs", "prefect.task_runs"):  # their messages have names and texts of a store
    logging.getLogger(_name).addFilter(PrintableMessages())
