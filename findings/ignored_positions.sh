#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: BLOOM, MPT and Falcon with alibi take `position_ids`, as most models do,
# and silently make nothing of them. Rows that are packed with positions that begin again at each text so see
# the text before them; models that read them (Llama) have other logits. Nothing is raised or logged.
#
# Seen: logits with positions 0 1 2 3 0 1 2 3 differ by exactly 0 from those without; those of Llama differ.
# Exits 0 while this is so.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/env"
"$dir/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cd "$dir" && HF_HUB_OFFLINE=1 env/bin/python - <<'PYTHON'
import sys
import torch, transformers
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, LlamaConfig, MptConfig

print("torch", torch.__version__, "transformers", transformers.__version__)
ids, positions = torch.arange(5, 13)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
wide = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
configs = {
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_head=2, n_layer=1),
    "mpt": MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1),
    "falcon": FalconConfig(alibi=True, **wide),
    "llama": LlamaConfig(intermediate_size=32, **wide),
}
differences = {}
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = [model(input_ids=ids, **more).logits for more in ({}, {"position_ids": positions})]
    differences[name] = float((logits[0] - logits[1]).abs().max())
print(differences)
sys.exit(not (differences.pop("llama") > 0 and not any(differences.values())))
PYTHON
