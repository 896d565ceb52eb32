"""The alarms of a training run, and the Trainer's warning when one goes on."""

import logging
from collections.abc import Mapping

from storage.queries import query
from storage.store import RunStore
from tba.alarms import Alarms

log = logging.getLogger("tba.learn")


class RunAlarms:
    """The alarms of a training run. Logs a warning when an alarm goes on."""

    def __init__(self, store: RunStore, resumed_from: int) -> None:
        """`resumed_from`: the last step of earlier attempts whose rows count; 0: none."""
        self._alarms = Alarms()
        for row in query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist() if resumed_from else []:
            self._alarms.see(row)

    @property
    def on(self) -> dict[str, str]:
        """The messages of the alarms that are on, by name."""
        return self._alarms.on

    def see(self, row: Mapping) -> None:
        self._warn(self.on, self._alarms.see(row))

    def see_silence(self, silent_s: float) -> None:
        self._warn(self.on, self._alarms.see_silence(silent_s))

    def _warn(self, before: dict[str, str], now: dict[str, str]) -> None:
        for name in now.keys() - before.keys():
            log.warning(now[name])
