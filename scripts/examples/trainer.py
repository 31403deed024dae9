"""The Trainer of Hugging Face as a peer, by one callback.

    python scripts/examples/trainer.py              starts a swarm, prints its ADDRESS and waits for
                                                    a second peer
    python scripts/examples/trainer.py ADDRESS      joins it, from another terminal

A small GPT-2 learns the sources of torch. The Trainer's seed is 42 everywhere; the callback gives
each peer an order of the data of its own, and says so. 60 steps each, in half a minute, with an
evaluation of the same model on both at the
end: they print the same loss and the same anchors. The swarm's figures are in the Trainer's log,
    wandb included.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from diloco import DilocoCallback

LENGTH = 64  # tokens of a sequence

files = sorted(Path(torch.__file__).parent.glob("*.py"))
text = "".join(file.read_text(errors="ignore") for file in files)[:500_000]
tokens = torch.tensor([min(ord(letter), 127) for letter in text])
rows = [
    {"input_ids": row, "labels": row}
    for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
]
train, held_out = rows[:-200], rows[-200:]

model = GPT2LMHeadModel(
    GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=60,  # a multiple of sync_every: what comes after the last exchange reaches nobody
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    warmup_steps=5,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
own = DilocoCallback(run_id="trainer", address=sys.argv[1:], sync_every=10, rounds=6, min_peers=2)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, callbacks=[own])

trainer.train()
print(
    f"held-out loss {trainer.evaluate()['eval_loss']:.3f}, anchors {own.attachment.anchor_digest()}"
)
