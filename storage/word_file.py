"""The word file: tokens and log-probabilities of the trajectories in the replay buffer, on disk and not in memory."""

import errno
import hashlib
import os
import resource
import tempfile
from array import array
from itertools import pairwise
from typing import IO

import numpy as np
import pyarrow as pa

from storage.patience import with_room

_NAME = "the replay buffer's word file"
WORD_BYTES = 4  # a token id (int32) or a log-probability (float32)
SEGMENT_BYTES = 64 * 1024**2
# When at most this share of a segment's records is still stored, these are copied and the segment is freed. This is
# checked each time that another segment is full. With records of equal length the file takes about four times the room
# of the stored records, and two segments.
FREED_SHARE = 0.25


def _temporary_file() -> IO[bytes]:
    """A new file. If the process has as many open files as its soft limit allows, the limit is raised first.

    The usual limit, 1,024 files, is that of a word file of 64 GB.
    """

    def create() -> IO[bytes]:
        return tempfile.TemporaryFile(prefix="tba-words-", buffering=0)

    try:
        return create()
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return create()


class _Segment:
    """Successive records in a temporary file of 4-byte words.

    The file has no name, so the system removes it when the process ends, also after a kill. It is read with pread,
    because in a memory map every page ever read would count as resident memory.
    """

    def __init__(self, first: int):
        """`first`: the number of its first record."""
        self._file = with_room(_temporary_file, _NAME)
        self.first = first
        self._starts = array("q", [0])  # of each record in words, and of the next one

    @property
    def num_records(self) -> int:
        return len(self._starts) - 1

    @property
    def num_bytes(self) -> int:
        return self._starts[-1] * WORD_BYTES

    def append(self, data: memoryview, num_words: np.ndarray) -> None:
        """Appends records of so many words each, one after the other."""
        begin = self._starts[-1]
        with_room(lambda: self._write(data, begin * WORD_BYTES), _NAME)
        self._starts.frombytes((begin + np.cumsum(num_words)).tobytes())

    def _write(self, data: memoryview, offset: int) -> None:
        while data:  # a disk that fills up takes a part
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, record: int) -> bytes:
        begin, end = self._starts[record - self.first], self._starts[record - self.first + 1]
        return os.pread(self._file.fileno(), (end - begin) * WORD_BYTES, begin * WORD_BYTES)


class WordFile:
    """Tokens and log-probabilities of the stored trajectories, in segments that are freed.

    A record is one trajectory: its number of prompt tokens, then prompt tokens, response tokens, behavior and reference
    log-probabilities. Records are numbered from 0 in the order of arrival, and no number is used twice. A record stays
    when the index drops its trajectory, until its segment is freed.
    """

    COLUMNS = ("prompt_tokens", "response_tokens", "behavior_logprobs", "reference_logprobs")
    TYPES = (pa.int32(), pa.int32(), pa.float32(), pa.float32())

    def __init__(self):
        self._segments = [_Segment(0)]  # the last one grows
        self.num_filled = 0
        """Segments that were ever filled."""

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
        records = self._append(memoryview(words).cast("B"), num_words)
        responses = columns[self.COLUMNS.index("response_tokens")]
        bounds, tokens = responses.offsets.tolist(), memoryview(responses.values.to_numpy())
        digests = [hashlib.blake2b(tokens[start:end], digest_size=8).digest() for start, end in pairwise(bounds)]
        return {"record": records, "response_digest": np.frombuffer(b"".join(digests), np.int64)}

    def _append(self, data: memoryview, num_words: np.ndarray) -> np.ndarray:
        """The numbers of the new records."""
        last = self._segments[-1]
        if last.num_bytes >= SEGMENT_BYTES:
            last = _Segment(last.first + last.num_records)
            self._segments.append(last)
            self.num_filled += 1
        first = last.first + last.num_records
        last.append(data, num_words)
        return first + np.arange(len(num_words))

    def read(self, records: np.ndarray) -> dict[str, pa.ListArray]:
        """The records with these numbers, in that order, as the four list columns of `COLUMNS`."""
        found = self._read(records)
        num_words = np.array([len(data) // WORD_BYTES for data in found])
        words = np.frombuffer(b"".join(found), np.int32)
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

    def _read(self, records: np.ndarray) -> list[bytes]:
        places = np.searchsorted([segment.first for segment in self._segments], records, side="right") - 1
        pairs = zip(places.tolist(), records.tolist(), strict=True)
        return [self._segments[place].read(record) for place, record in pairs]

    def sparse(self, stored: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The segments to free: the first record's number, and the records that are stored.

        stored: the numbers of all stored records, in order.
        """
        firsts = [segment.first for segment in self._segments]
        of_full = [stored[begin:end] for begin, end in pairwise(np.searchsorted(stored, firsts))]
        pairs = zip(self._segments[:-1], of_full, strict=True)
        return [(full.first, records) for full, records in pairs if len(records) <= FREED_SHARE * full.num_records]

    def copy(self, records: np.ndarray) -> np.ndarray:
        """Appends copies of these records. Returns their numbers, in that order."""
        data = self._read(records)
        num_words = np.array([len(of_one) // WORD_BYTES for of_one in data], np.int64)
        return self._append(memoryview(b"".join(data)), num_words)

    def free(self, first: int) -> None:
        """Frees the segment with this first record. None of its records may be stored any more."""
        self._segments = [segment for segment in self._segments if segment.first != first]

    @staticmethod
    def _positions(starts: np.ndarray, lengths: np.ndarray, column: int) -> np.ndarray:
        """Where the words of one column are, record after record, given starts [rows] and lengths [rows, columns]."""
        of_column = lengths[:, column]
        first = starts + 1 + lengths[:, :column].sum(axis=1)
        return np.arange(of_column.sum()) + np.repeat(first - np.cumsum(of_column) + of_column, of_column)
