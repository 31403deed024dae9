"""A model of the hub, fine-tuned by a swarm on your text.

    python scripts/examples/hub_model.py --model HuggingFaceTB/SmolLM2-135M --text a/
    python scripts/examples/hub_model.py ADDRESS --model HuggingFaceTB/SmolLM2-135M --text b/

The first one starts a swarm, prints its ADDRESS and waits for a second peer; both name the same
model, a repository of the hub or a directory. `--text` is a file or a folder of text files; peers
have different ones, or draw different parts of the same by `swarm.seed`. Without arguments it makes
a tiny model and takes the sources of torch, so that it runs offline in half a minute. At the end
the model is in out/, as `from_pretrained` reads it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from diloco import Swarm

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("address", nargs="?")
parser.add_argument("--model", help="a repository of the hub, or a directory")
folder = Path(torch.__file__).parent
parser.add_argument("--text", type=Path, default=folder, help="a text file, or a folder of them")
parser.add_argument("--out", type=Path, default=Path("out"), help="where the model goes")
parser.add_argument("--steps", type=int, default=40, help="inner steps")
parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
arguments = parser.parse_args()


def tiny(text):
    """A directory with a model and a tokenizer, as the hub would give it; the same on all peers."""
    place = tempfile.mkdtemp()
    plain = ByteLevelBPETokenizer()
    plain.train_from_iterator([text], 512, show_progress=False, special_tokens=["<eos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=plain._tokenizer, eos_token="<eos>")
    made.save_pretrained(place)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape)).save_pretrained(place)
    return place


files = sorted(file for end in ("txt", "md", "py") for file in arguments.text.glob(f"*.{end}"))
text = "\n".join(file.read_text(errors="ignore") for file in files or [arguments.text])[:300_000]

name = arguments.model or tiny(text)
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
rows = tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)
train, held_out = rows[:-20], rows[-20:]


@torch.no_grad()
def evaluate():
    return model(input_ids=held_out, labels=held_out).loss.item()


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if arguments.model is None else 2e-5)
swarm = Swarm(run_id="hub_model", address=arguments.address, sync_every=10, min_peers=2)
generator = torch.Generator().manual_seed(swarm.seed)  # another one on each peer
before = evaluate()
with swarm, swarm.attach(model, optimizer) as sync:
    while swarm.steps < arguments.steps:
        batch = train[torch.randint(len(train), (8,), generator=generator)]
        if sync.steps == 0:
            print(f"first batch: {tokenizer.decode(batch[0])!r}")
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

model.save_pretrained(arguments.out)
tokenizer.save_pretrained(arguments.out)
print(f"held-out loss {before:.3f} before, {evaluate():.3f} after, anchors {sync.anchor_digest()}")
