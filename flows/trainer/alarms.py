"""The alarms of a run that trains: one that goes on is a warning in the Trainer's log."""

import logging
from collections.abc import Mapping

from storage.queries import query
from storage.store import RunStore
from tba.alarms import Alarms

log = logging.getLogger("tba.learn")


class RunAlarms:
    """The alarms of a run that trains; one that goes on is a warning in the log."""

    def __init__(self, store: RunStore, resumed_from: int) -> None:
        """`resumed_from`: the last step of the Trainer's earlier lives, whose rows count; 0: there are none."""
        self._alarms = Alarms()
        for row in query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist() if resumed_from else []:
            self._alarms.see(row)

    @property
    def on(self) -> dict[str, str]:
        """By name the messages of those that are on."""
        return self._alarms.on

    def see(self, row: Mapping) -> None:
        self._warn(self.on, self._alarms.see(row))

    def see_silence(self, silent_s: float) -> None:
        self._warn(self.on, self._alarms.see_silence(silent_s))

    def _warn(self, before: dict[str, str], now: dict[str, str]) -> None:
        for name in now.keys() - before.keys():
            log.warning(now[name])
