"""The word file: tokens and log-probabilities of the trajectories in the replay buffer, on disk and not in memory."""

import hashlib
import os
import tempfile
from array import array
from itertools import pairwise

import numpy as np
import pyarrow as pa

from storage.patience import with_room

_NAME = "the replay buffer's word file"
WORD_BYTES = 4  # a token id (int32) or a log-probability (float32)


class WordFile:
    """Tokens and log-probabilities of the stored trajectories, in one append-only temporary file of 4-byte words.

    A record is one trajectory: its number of prompt tokens, then prompt tokens, response tokens, behavior and reference
    log-probabilities. Records are numbered from 0 in the order of arrival. A record stays when the index drops its
    trajectory. The file has no name, so the system removes it when the process ends, also after a kill. It is read with
    pread, because in a memory map every page ever read would count as resident memory.
    """

    COLUMNS = ("prompt_tokens", "response_tokens", "behavior_logprobs", "reference_logprobs")
    TYPES = (pa.int32(), pa.int32(), pa.float32(), pa.float32())

    def __init__(self):
        self._file = with_room(lambda: tempfile.TemporaryFile(prefix="tba-words-", buffering=0), _NAME)  # noqa: SIM115, closed with the object
        self._starts = array("q", [0])  # of each record in words, and of the next one

    def append(self, table: pa.Table) -> dict[str, np.ndarray]:
        """Appends each row's record. Returns two columns for the index: record number, digest of the response."""
        columns = [table[name].combine_chunks() for name in self.COLUMNS]
        ends = np.stack([column.offsets.to_numpy() for column in columns], axis=1)  # [rows + 1, columns]
        lengths = np.diff(ends, axis=0)
        # `read` finds the columns by this; storage/intake.py refuses other shards
        assert (lengths[:, 1:] == lengths[:, 1:2]).all(), "log-probabilities and response tokens differ in number"
        num_words = 1 + lengths.sum(axis=1)
        starts = np.cumsum(num_words) - num_words
        words = np.empty(num_words.sum(), np.int32)
        words[starts] = lengths[:, 0]
        for index, column in enumerate(columns):
            values = column.values.to_numpy()[ends[0, index] : ends[-1, index]]
            words[self._positions(starts, lengths, index)] = values.view(np.int32)
        first, begin = len(self._starts) - 1, self._starts[-1]
        with_room(lambda: self._write(words.tobytes(), begin * WORD_BYTES), _NAME)
        self._starts.frombytes((begin + starts + num_words).tobytes())
        responses = columns[self.COLUMNS.index("response_tokens")]
        bounds, tokens = responses.offsets.to_numpy(), memoryview(responses.values.to_numpy())
        digests = [hashlib.blake2b(tokens[start:end], digest_size=8).digest() for start, end in pairwise(bounds)]
        digest = np.frombuffer(b"".join(digests), np.int64)
        return {"record": first + np.arange(len(starts)), "response_digest": digest}

    def _write(self, data: bytes, offset: int) -> None:
        while data:  # a disk that fills up takes a part
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, records: np.ndarray) -> dict[str, pa.ListArray]:
        """The records with these numbers, in that order, as the four list columns of `COLUMNS`."""
        all_starts = np.frombuffer(self._starts, np.int64)
        begins, num_words = all_starts[records], all_starts[records + 1] - all_starts[records]
        places = zip((num_words * WORD_BYTES).tolist(), (begins * WORD_BYTES).tolist(), strict=True)
        file = self._file.fileno()
        words = np.frombuffer(b"".join([os.pread(file, size, offset) for size, offset in places]), np.int32)
        starts = np.cumsum(num_words) - num_words
        prompt_length = words[starts]
        response_length = (num_words - 1 - prompt_length) // 3
        lengths = np.stack([prompt_length, *[response_length] * 3], axis=1)  # [rows, columns]
        columns = {}
        for index, (name, word_type) in enumerate(zip(self.COLUMNS, self.TYPES, strict=True)):
            values = pa.array(words[self._positions(starts, lengths, index)]).view(word_type)
            ends = np.cumsum([0, *lengths[:, index]]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(ends, values)
        return columns

    @staticmethod
    def _positions(starts: np.ndarray, lengths: np.ndarray, column: int) -> np.ndarray:
        """Where the words of one column are, record after record, given starts [rows] and lengths [rows, columns]."""
        of_column = lengths[:, column]
        first = starts + 1 + lengths[:, :column].sum(axis=1)
        return np.arange(of_column.sum()) + np.repeat(first - np.cumsum(of_column) + of_column, of_column)
