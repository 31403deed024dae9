"""A LoRA on conversations, by two commands, which this file types for two terminals of one machine.

    diloco train model=pretrained model.path=ORG/MODEL@COMMIT adapter=lora data=chat
                 data.path=chats.jsonl swarm=network swarm.min_peers=2
    diloco join ADDRESS data.path=my_chats.jsonl

    python scripts/examples/chat_lora.py            the first, on a tiny base, which it makes
    python scripts/examples/chat_lora.py ADDRESS    the second, from another terminal
    python scripts/examples/chat_lora.py ADDRESS 2  a third, which may come late

Each machine reads its own conversations, none is sent, and only the adapter travels. Of a base on
the hub the others fetch the same commit; this one is a directory of the first, so they get it from
their peers. 10 rounds, in a minute; the first writes the adapter to adapter/, as peft loads it, and
the whole model to model/.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

SMALL = (
    "experiment=smoke budget.outer_steps=10 inner.batch_size=8 inner.lr=1e-2 outer.sync_every=5"
    " data=chat data.sequence_length=64 data.tokenizer=bytes run.id=chat-lora swarm.min_peers=2"
    " model=pretrained model.config={} adapter=lora model.adapter_targets=all-linear"
).split()


def diloco(*arguments):
    """Type a command; a failed one ends this program."""
    print("$ diloco", *arguments, flush=True)
    ended = subprocess.run([sys.executable, "-m", "diloco", *arguments])
    if ended.returncode:
        sys.exit(ended.returncode)


joins, number = sys.argv[1:2], int((*sys.argv[2:3], len(sys.argv[1:]))[0])
place = Path(tempfile.mkdtemp())
shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "eos_token_id": 0}
shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}

sums = [(a, b) for a in range(40) for b in range(40) if (a + b) % 3 == number]
with (place / "chats.jsonl").open("w") as file:
    for a, b in sums:
        asked, answer = f"{a} + {b}?", f"It is {a + b}."
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": messages}) + "\n")

print(f"first conversation: {sums[0]}", flush=True)
own = [f"data.path={place / 'chats.jsonl'}", "train.device=cpu"]
if joins:
    diloco("join", *joins, *own, "--yes")
else:
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(place / "base")
    diloco("train", *SMALL, *own, f"model.path={place / 'base'}")
    diloco("export", "runs/chat-lora", "adapter")
    diloco("export", "runs/chat-lora", "model", "--merge")
