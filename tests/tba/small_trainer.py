"""A Trainer of a Llama with a few hundred weights, and batches for it."""

from tba.batch import Draw
from tba.config import TrainSettings
from tba.logprobs import Group
from tba.trainer import Trainer


def make_draw(prompt, responses, slot, reference_logprob, reward) -> Draw:
    """`reference_logprob`: of each distinct response, all of it in its first token; sampled a little more likely."""
    reference = [
        [value] + [0.0] * (len(tokens) - 1) for value, tokens in zip(reference_logprob, responses, strict=True)
    ]
    behavior = [[value + 0.5, *others] for value, *others in reference]
    return Draw(Group(prompt, responses), slot, reward, behavior, reference, [True] * len(responses))


DRAWS = [
    make_draw([5, 6, 7], [[1, 2, 3], [4, 9]], [0, 1, 0, 1], [-3.0, -2.0], [1.0, 0.0, 1.0, 0.0]),
    make_draw([8, 2], [[3], [6, 6, 1], [2]], [0, 1, 2, 0], [-2.0, -4.0, -3.0], [0.0, 1.0, 0.0, 0.0]),
    make_draw([1], [[9, 9], [7]], [0, 1, 0, 1], [-5.0, -1.0], [1.0, 0.0, 1.0, 0.0]),
]


def make_trainer(model_folder, **settings) -> Trainer:
    return Trainer(model_folder, TrainSettings(**{"steps": 20, "learning_rate": 1e-2, "warmup_steps": 0} | settings))
