"""Near-duplicates of a prompt's responses: of two similar responses, the one with the lower reward is dropped.

As in GFlowNet red-teaming (arXiv 2405.18540, and its code): texts are near when their edit distance is under a share
of their lengths' sum, 0.25 there. Committed shards never change, so a kept response stays, even if a better
near-duplicate comes later. The published code would replace it.
"""

from collections.abc import Sequence

# Number of the best responses to each prompt that new ones are compared with; each comparison takes time in each round.
REMEMBERED = 1000
REMEMBERED_IN_ALL = 100_000  # of these; the prompts that were asked last keep theirs


class NearDuplicates:
    """The responses that one Searcher has kept, by prompt."""

    def __init__(self, distance: float) -> None:
        """`distance`: as a share of both lengths' sum, in (0, 1)."""
        self._distance = distance
        # by prompt_id, the one asked last at the end: reward, text and round, the best first
        self._kept: dict[str, list[tuple[float, str, int]]] = {}
        self._newest_round = None

    def keep(
        self, number: int, prompt_ids: Sequence[str], texts: Sequence[str], rewards: Sequence[float]
    ) -> list[bool]:
        """Whether each response of round `number` is kept: no near-duplicate so far has an equal or higher reward."""
        if number == self._newest_round:  # the round is repeated: the last try's responses were not stored
            for known in self._kept.values():
                known[:] = [entry for entry in known if entry[2] != number]
        self._newest_round = number
        keeps = [False] * len(texts)
        for index in sorted(range(len(texts)), key=lambda index: -rewards[index]):
            known = self._kept[prompt_ids[index]] = self._kept.pop(prompt_ids[index], [])
            if not any(reward >= rewards[index] and self._is_near(texts[index], text) for reward, text, _ in known):
                keeps[index] = True
                known.append((rewards[index], texts[index], number))
                known.sort(key=lambda entry: -entry[0])
                del known[REMEMBERED:]
        num_remembered = sum(map(len, self._kept.values()))
        while num_remembered > REMEMBERED_IN_ALL:
            num_remembered -= len(self._kept.pop(next(iter(self._kept))))
        return keeps

    def _is_near(self, one: str, other: str) -> bool:
        from rapidfuzz.distance import Levenshtein

        limit = self._distance * (len(one) + len(other))
        return one == other or Levenshtein.distance(one, other, score_cutoff=int(limit)) < limit
