"""Near-duplicates of a prompt's responses: of two that nearly say the same, the one that is worth less is dropped.

As in GFlowNet red-teaming (arXiv 2405.18540, and its code): texts are near when their edit distance is under a share
of their lengths' sum, 0.25 there. Committed shards never change, so what was kept before stays, even where something
better comes later; the predecessor's buffer would put that in its place.
"""

from collections.abc import Sequence

# Of each prompt this many of the best are remembered: what a new response is compared with costs time in each round.
REMEMBERED = 1000


class NearDuplicates:
    """What one Searcher has kept, by prompt."""

    def __init__(self, distance: float) -> None:
        """`distance`: as a share of both lengths' sum, in (0, 1)."""
        self._distance = distance
        self._kept: dict[str, list[tuple[float, str]]] = {}  # by prompt_id: reward and text, the best first

    def keep(self, prompt_ids: Sequence[str], texts: Sequence[str], rewards: Sequence[float]) -> list[bool]:
        """For each response whether it is kept: nothing near it is worth as much, in this round or before."""
        keeps = [False] * len(texts)
        for index in sorted(range(len(texts)), key=lambda index: -rewards[index]):
            known = self._kept.setdefault(prompt_ids[index], [])
            if not any(reward >= rewards[index] and self._is_near(texts[index], text) for reward, text in known):
                keeps[index] = True
                known.append((rewards[index], texts[index]))
                known.sort(key=lambda pair: -pair[0])
                del known[REMEMBERED:]
        return keeps

    def _is_near(self, one: str, other: str) -> bool:
        from rapidfuzz.distance import Levenshtein

        limit = self._distance * (len(one) + len(other))
        return one == other or Levenshtein.distance(one, other, score_cutoff=int(limit)) < limit
