"""Models that score text: sequence classifiers from transformers, and two scorers that need no download.

    reward model       one number a text                                  "rouge-l": overlap with the reference summary
    toxicity           probability that a text is toxic, in (0, 1)        "better-profanity": a list of words

The two scorers come with packages. Classifiers on PyPI have pickled weights, which can run code when loaded, so they
are not used. The scorers are for tests and first runs; their judgement is poor.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tba.model_files import weight_files

ROUGE_L = "rouge-l"
WORD_LIST = "better-profanity"
TEXTS_PER_PASS = 32
MAX_TOKENS = 1024  # of a scored text, where the model tells no limit; a longer text keeps its end with the response
TOXIC = ("toxic", "toxicity", "hate", "hateful", "offensive", "harmful", "unsafe")  # labels of toxic text
SURE = 1e-3  # the word list's probabilities stay this far from 0 and 1, so that their logarithms are bounded


class SequenceClassifier:
    """A sequence-classification model of transformers, from safetensors; it loads on the first use."""

    def __init__(self, name: str, field: str) -> None:
        """`name`: a folder or a Hugging Face id; `field`: the setting that names it, for error messages."""
        self.name, self._field = name, field

    def check(self, num_labels: int | None = None) -> None:
        """`num_labels`: how many it must have; None: any number, one of them for toxic text.

        Raises: ValueError: it cannot be reached, is no sequence classifier, lacks safetensors or a tokenizer, has
        another number of labels, or none of them is for toxic text.
        """
        from transformers import AutoConfig, AutoTokenizer
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

        try:
            config = AutoConfig.from_pretrained(self.name, trust_remote_code=False)
        except Exception as error:  # transformers and the hub raise exceptions of their own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{self._field}: {self.name!r} does not load ({reason})") from error
        if config.model_type not in KNOWN:
            raise ValueError(f"{self._field}: {self.name!r} is a {config.model_type}, which classifies no sequences")
        saved_as = ", ".join(config.architectures or []) or "no class"
        if "ForSequenceClassification" not in saved_as:  # transformers would draw a classifying layer at random
            raise ValueError(
                f"{self._field}: {self.name!r} was saved as {saved_as}, without a classifier's weights; give a model "
                "that was saved as a …ForSequenceClassification"
            )
        if num_labels not in (None, config.num_labels):
            raise ValueError(
                f"{self._field}: {self.name!r} has {config.num_labels} labels; one with {num_labels} is needed here"
            )
        if num_labels is None:
            self._toxic_label(config)
        if Path(self.name).is_dir() and not weight_files(Path(self.name)):
            raise ValueError(f"{self._field}: {self.name!r} has no model.safetensors; save it in that format")
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False)
        except Exception as error:  # as above
            raise ValueError(f"{self._field}: {self.name!r} has no tokenizer that loads ({error})") from error
        if len(tokenizer) - len(tokenizer.all_special_ids) < 2:  # without its files transformers makes an empty one
            raise ValueError(f"{self._field}: {self.name!r} has no tokenizer that loads (its vocabulary is empty)")

    def logits(self, texts: Sequence[str]):
        """[N, labels], float32 on the CPU."""
        import torch

        tokenizer, model = self._loaded
        parts = []
        for start in range(0, len(texts), TEXTS_PER_PASS):
            batch = tokenizer(
                list(texts[start : start + TEXTS_PER_PASS]), return_tensors="pt", padding=True, truncation=True,
            )  # fmt: skip
            with torch.inference_mode():
                parts.append(model(**batch.to(model.device)).logits.float().cpu())
        return torch.cat(parts)

    def rewards(self, texts: Sequence[str]) -> list[float]:
        """The logit of a reward model's only label, read at the end-of-sequence token, as reward models are trained.

        If that token is the padding, too, the score is read at the one before: transformers skips padding.
        Raises: ValueError: it has several labels.
        """
        tokenizer, _ = self._loaded
        ends_texts = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]  # as encoders' tokenizers do
        end = "" if ends_texts else tokenizer.eos_token or ""
        logits = self.logits([text + end for text in texts])
        if logits.shape[1] != 1:
            raise ValueError(f"{self._field}: {self.name!r} has {logits.shape[1]} labels; a reward model has one")
        return logits[:, 0].tolist()

    def probabilities(self, texts: Sequence[str]) -> list[float]:
        """Probability of the label for toxic text.

        If several labels may hold at once (the model's problem_type), each has a probability of its own.
        Raises: ValueError: no label is for toxic text.
        """
        config = self._loaded[1].config
        index, logits = self._toxic_label(config), self.logits(texts)
        each = logits.shape[1] == 1 or config.problem_type == "multi_label_classification"
        return (logits.sigmoid() if each else logits.softmax(-1))[:, index].tolist()

    def _toxic_label(self, config) -> int:
        """The only label, the first with a name of `TOXIC`, or the second of two without names."""
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(names) == 1 or names == ["LABEL_0", "LABEL_1"]:
            return len(names) - 1
        for index, name in enumerate(names):
            if name.lower() in TOXIC:
                return index
        raise ValueError(
            f"{self._field}: {self.name!r} has the labels {', '.join(names)}, of which none is known to be for toxic "
            f"text; rename that one to {TOXIC[0]!r} in id2label and label2id of its config.json"
        )

    @cached_property
    def _loaded(self):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from tba.precision import default_device

        tokenizer = AutoTokenizer.from_pretrained(
            self.name, trust_remote_code=False, truncation_side="left", padding_side="right"
        )
        model = AutoModelForSequenceClassification.from_pretrained(
            self.name, use_safetensors=True, trust_remote_code=False
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.model_max_length = most_tokens(model)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # the score is read before the padding
        return tokenizer, model.eval().to(default_device())


def most_tokens(model) -> int:
    """Tokens of a text that a classifier takes: as many as its configuration tells, or its table of positions has.

    RoBERTa's table and those like it begin after the row of the padding token.
    """
    from torch import nn

    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    rows = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for table in tables
        if isinstance(table, nn.Embedding)
    ]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_TOKENS
    return min([limit, *rows])


class WordList:
    """Toxicity by better-profanity's list: one half for the first word on it, and nearer to 1 with each more."""

    name = WORD_LIST

    def check(self) -> None:
        """Raises: ValueError: the package is not installed."""
        try:
            import better_profanity  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"task.classifier: {WORD_LIST} is not installed; install it, or tba's extra tasks"
            ) from error

    def probabilities(self, texts: Sequence[str]) -> list[float]:
        from better_profanity import profanity

        counts = (sum(profanity.contains_profanity(word) for word in text.split()) for text in texts)
        return [min(max(1 - 0.5**count, SURE), 1 - SURE) for count in counts]


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L's F1 (Lin 2004): the longest common subsequence of words, against both lengths; 0 to 1."""
    words, others = text.lower().split(), reference.lower().split()
    row = [0] * (len(others) + 1)
    for word in words:
        diagonal = 0
        for place, other in enumerate(others, start=1):
            diagonal, row[place] = row[place], diagonal + 1 if word == other else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(words) + len(others)) if words and others else 0.0


def mean_log(probabilities: Sequence[float]) -> float:
    """Mean of the logarithms; 0 counts as the smallest positive float32."""
    return sum(math.log(max(p, 1e-45)) for p in probabilities) / len(probabilities)
