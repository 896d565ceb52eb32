"""The replay buffer's index: a DuckDB database of the stored trajectories, and the word file with their tokens.

One thread writes, another may read meanwhile: a reader sees what was committed. storage/buffer.py decides what is
stored.
"""

import duckdb
import numpy as np
import pyarrow as pa

from storage.sql import sql
from storage.word_file import WordFile


class Index:
    """Prompts, trajectories and their words. Without a transaction each write is committed at once."""

    def __init__(self, capacity_per_prompt: int):
        # One thread: queries of milliseconds gain nothing from more, and training needs the cores.
        self._writer = duckdb.connect(config={"threads": 1})
        self._writer.execute(sql("create_index"))
        self._reader = self._writer.cursor()
        self._capacity_per_prompt = capacity_per_prompt
        self._statements: dict[str, duckdb.Statement] = {}
        self.prompt_ids: dict[int, str] = {}
        """By the number of a prompt, as in the database: a join would cost a millisecond a draw."""
        self.words, self._num_filled = WordFile(), 0
        self._moved: list[int] = []  # segments to free, by their first record

    def begin(self) -> None:
        self._writer.begin()

    def commit(self) -> None:
        self._writer.commit()

    def rollback(self) -> None:
        self._writer.rollback()

    def insert(self, shards: pa.Table, sync: np.ndarray, ages_from: np.ndarray) -> None:
        """Adds trajectories. sync, ages_from: of each row. Call `settle` after the last ones."""
        arrivals = shards.select(["trajectory_id", "prompt_id", "policy_step", "reward"])
        columns = {"sync": sync, "ages_from": ages_from} | self.words.append(shards)
        for name, column in columns.items():
            arrivals = arrivals.append_column(name, [column])
        self._writer.register("arrivals", arrivals)
        self.prompt_ids |= self._write("insert_prompts").fetchall()
        self._write("insert_trajectories")
        self._writer.unregister("arrivals")

    def settle(self, prompt_ids: pa.Array) -> None:
        """Deletes repeats and rows beyond the capacity of these prompts, once whole syncs are inserted."""
        self._writer.register("arrivals", pa.table({"prompt_id": prompt_ids}))
        self._writer.register("touched", self._writer.sql(sql("list_touched")).to_arrow_table())
        self._write("count_copies")
        limit = {"capacity_per_prompt": self._capacity_per_prompt}
        superseded = self._writer.sql(sql("list_superseded"), params=limit).to_arrow_table()
        self._writer.register("superseded", superseded)
        self._write("delete_superseded")
        self._write("update_prompts")
        for table in ("arrivals", "touched", "superseded"):
            self._writer.unregister(table)

    def drop(self, through: int) -> None:
        """Deletes the trajectories of all syncs up to this one; 0: of none."""
        self._writer.execute("DELETE FROM trajectories WHERE sync <= ?", [through])
        self._writer.execute("UPDATE prompts SET newest_sync = NULL WHERE newest_sync <= ?", [through])

    def newest_policy(self, sync: int) -> int:
        """The largest policy step of a sync's trajectories, as the writer sees them; -1: it has none."""
        query = "SELECT coalesce(max(policy_step), -1) FROM trajectories WHERE sync = ?"
        return self._writer.execute(query, [sync]).fetchone()[0]

    def move_words(self) -> None:
        """Copies the stored records out of word-file segments that hold few of them, so that these can be freed."""
        if self.words.num_filled == self._num_filled:
            return
        self._num_filled = self.words.num_filled
        stored = np.sort(self._writer.execute("SELECT record FROM trajectories").fetchnumpy()["record"])
        for first, records in self.words.sparse(stored):
            self._writer.register("moved", pa.table({"record": records, "copy": self.words.copy(records)}))
            self._write("move_records")
            self._writer.unregister("moved")
            self._moved.append(first)

    def free_words(self) -> None:
        """Frees the segments whose records were moved. No read may be in progress."""
        while self._moved:
            self.words.free(self._moved.pop())

    def free_moved_words(self) -> None:
        self.move_words()
        self.free_words()

    def read(self, query: str, parameters: dict) -> dict[str, np.ndarray]:
        """The columns of a query of storage/sql, over what is committed."""
        return self._reader.execute(self._parsed(self._reader, query), parameters).fetchnumpy()

    @property
    def num_trajectories(self) -> int:
        return self._count("SELECT count(*) FROM trajectories")

    @property
    def num_prompts(self) -> int:
        """Those with stored trajectories."""
        return self._count("SELECT count(newest_sync) FROM prompts")

    def num_from_before(self, oldest: int) -> int:
        """The number of trajectories with a smaller `ages_from`."""
        return self._count("SELECT count(*) FROM trajectories WHERE ages_from < ?", oldest)

    def _count(self, query: str, *parameters: int) -> int:
        return self._reader.execute(query, parameters).fetchone()[0]

    def _write(self, query: str, parameters: dict | None = None) -> duckdb.DuckDBPyConnection:
        return self._writer.execute(self._parsed(self._writer, query), parameters)

    def _parsed(self, connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement:
        """A query is parsed once: parsing takes a tenth of the time of a draw."""
        if query not in self._statements:
            (self._statements[query],) = connection.extract_statements(sql(query))
        return self._statements[query]
