"""The alarms of a training run, and the Trainer's warning when one goes on."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from storage.queries import query
from storage.store import RunStore
from tba.alarms import Alarms

FILE = "alarms.json"  # of a checkpoint

log = logging.getLogger("tba.trainer")


class RunAlarms:
    """The alarms of a training run. Logs a warning when an alarm goes on.

    A checkpoint has their state. To compute it again from the rows of a long run takes a minute.
    """

    def __init__(self) -> None:
        self._alarms = Alarms()

    def saving(self) -> Callable[[Path], object]:
        """Writes the state of now into a checkpoint's folder."""
        state = json.dumps(self._alarms.state())
        return lambda checkpoint: (checkpoint / FILE).write_text(state)

    def load(self, checkpoint: Path, store: RunStore) -> None:
        """Goes on from the state in a checkpoint's folder; of an older version's checkpoint, from the run's rows."""
        try:
            self._alarms.restore(json.loads((checkpoint / FILE).read_bytes()))
            return
        except (FileNotFoundError, ValueError) as error:
            log.info("the alarms are computed from all steps of the run, because the checkpoint has none: %s", error)
        for row in query(store, "SELECT * FROM training_steps ORDER BY step").to_pylist():
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
