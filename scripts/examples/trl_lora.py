"""TRL's SFTTrainer with a LoRA, on conversations: only the adapter travels.

    python scripts/examples/trl_lora.py              starts a swarm, prints its ADDRESS and waits
                                                     for a second peer
    python scripts/examples/trl_lora.py ADDRESS      joins it, from another terminal
    python scripts/examples/trl_lora.py --full       all parameters instead; the joiner says it, too

Needs `pip install 'diloco[hf,lora]' trl`. The base model is the same on all peers, and frozen
parameters are not sent: a round sends a byte for each value of the adapter. Each peer has
conversations of its own, sums that it has drawn by itself. 20 steps each, in half a minute. At the
end both have the same adapter, and say how much they have sent.
"""

import random
import secrets
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from diloco import DilocoCallback

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROUNDS, STEPS = 4, 5  # exchanges, and steps between two of them


def conversations(count, seed):
    """Of different peers, different sums."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [
        [
            {"role": "user", "content": f"How much is {one} plus {other}?"},
            {"role": "assistant", "content": f"{one} plus {other} is {one + other}."},
        ]
        for one, other in pairs
    ]


mine = conversations(400, secrets.randbits(31))
# a model of the hub brings its own tokenizer, with its own template
plain = ByteLevelBPETokenizer()
text = [turn["content"] for talk in conversations(400, 0) for turn in talk]
plain.train_from_iterator(
    text, 400, show_progress=False, special_tokens=["<eos>", "<|user|>", "<|assistant|>"]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=plain._tokenizer, eos_token="<eos>", pad_token="<eos>"
)
tokenizer.chat_template = TEMPLATE

torch.manual_seed(0)  # the base model is the same everywhere; another one is refused
shape = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)
)
arguments = SFTConfig(
    tempfile.mkdtemp(),
    max_steps=ROUNDS * STEPS,
    max_length=64,
    learning_rate=1e-2,
    save_strategy="no",
    logging_steps=5,
    bf16=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
address = [one for one in sys.argv[1:] if one != "--full"]
lora = (
    None
    if "--full" in sys.argv
    else LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
own = DilocoCallback(
    run_id="trl_lora", address=address, sync_every=STEPS, rounds=ROUNDS, min_peers=2
)
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_dict({"messages": mine}),
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=[own],
)
print(f"first conversation: {mine[0][1]['content']!r}")
trainer.train()
values = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
whole = sum(one.numel() for one in trainer.model.parameters())
print(
    f"a round sends {values} of {whole} values, {values / 1000:.1f} kB; anchors"
    f" {own.attachment.anchor_digest()}"
)
