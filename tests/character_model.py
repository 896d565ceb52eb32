"""A Llama with random weights whose tokens are characters: any task runs with it in no time, and learns nothing."""

from pathlib import Path

ARITHMETIC = "0123456789+= \n:Adinot"  # what that task is written in
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def save_character_model(
    folder: Path,
    characters: str = ARITHMETIC,
    *,
    chat_template: str | None = None,
    dtype: str = "float32",
    num_key_value_heads: int = 1,
    **shape: int,
) -> Path:
    """Writes model and tokenizer in Hugging Face format; `shape`: what differs from `TINY`. Returns the folder."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    ids = {text: number for number, text in enumerate(["[UNK]", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=chat_template).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(ids), num_key_value_heads=num_key_value_heads, **(TINY | shape),
        bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return folder
