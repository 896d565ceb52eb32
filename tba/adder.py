"""A small policy that adds badly, made in a minute or two: for comparisons that the embedded model is too slow for.

A Llama of 0.2 M parameters whose tokens are characters, trained from nothing on the arithmetic task's training sums by
cross-entropy until it answers two fifths of others greedily. Seeded: the same code makes the same policy on the
same machine.
"""

from pathlib import Path

CHARACTERS = "0123456789+= \n"
ENOUGH = 0.4  # accuracy on held-out sums at which it stops: room to learn, and enough right answers to learn from
SUMS_PER_STEP = 96
MAX_STEPS = 6000
STEPS_PER_TEST = 50


def make_adder(folder: Path) -> Path:
    """Trains the policy and saves it to `folder`, unless it is there. Raises: RuntimeError: it does not learn."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tba.tasks.arithmetic import Arithmetic

    names = {text: number for number, text in enumerate(["[UNK]", "</s>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()  # without it a decoded text has a space between characters
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="</s>")
    task = Arithmetic(data=None, seed=0)

    def rows(problems) -> torch.Tensor:
        """Prompt, space, digits, newline; all prompts are of one length, a shorter answer is followed by end tokens."""
        texts = [f"{problem.prompt} {problem.answer}\n" for problem in problems]
        longest = max(map(len, texts))
        return torch.tensor([[names[c] for c in text] + [1] * (longest - len(text)) for text in texts])

    prompt_length = len(task.train[0].prompt)
    common = task.train[0].prompt.rindex("\n") + 1  # the worked lines
    train, heldout = rows(task.train), rows(task.heldout[:256])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=1, pad_token_id=None,
        )
    )  # fmt: skip

    def answer_logits(batch: torch.Tensor) -> torch.Tensor:
        """What predicts each token behind the prompt; the worked lines are computed once."""
        begun = model(batch[:1, :common], use_cache=True).past_key_values
        begun.batch_repeat_interleave(len(batch))
        return model(batch[:, common:-1], past_key_values=begun).logits[:, prompt_length - 1 - common :]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(MAX_STEPS):
        batch = train[torch.randint(len(train), (SUMS_PER_STEP,))]
        logits = answer_logits(batch)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, prompt_length:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS_PER_TEST == STEPS_PER_TEST - 1:
            with torch.no_grad():
                said = answer_logits(heldout).argmax(-1)
            # greedy: a response is right where each of its tokens is the likeliest after those before it
            if (said == heldout[:, prompt_length:]).all(1).float().mean() >= ENOUGH:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                return folder
    raise RuntimeError(f"the small policy answers too few sums after {MAX_STEPS} steps: loss {loss.item():.3f}")
