#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: RoBERTa and its kin give a text other positions if it comes as
# `inputs_embeds` than if it comes as `input_ids`. By ids, a token that equals `pad_token_id` takes no
# position, and all behind it move up by one; by embeddings it takes one. So a text that has this id
# inside, such as packed rows, has other logits, and only from that token on. No mask is given, no warning
# is raised.
#
# Seen: behind the pad token the logits differ by 0.36, before it by 0; with explicit positions both agree.
# Exits 0 while this is so.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/env"
"$dir/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0
cd "$dir" && HF_HUB_OFFLINE=1 env/bin/python - <<'PYTHON'
import sys
import torch, transformers
from transformers import RobertaConfig, RobertaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
config = RobertaConfig(vocab_size=64, max_position_embeddings=32, is_decoder=True, **sizes)
torch.manual_seed(0)
model = RobertaForCausalLM(config).eval()
ids = torch.tensor([[0, 7, config.pad_token_id, 9, 10]])
embeds = model.get_input_embeddings()(ids)
positions = torch.arange(2, 7)[None]
with torch.no_grad():
    by_ids, by_embeds = model(input_ids=ids).logits, model(inputs_embeds=embeds).logits
    explicit = model(input_ids=ids, position_ids=positions).logits
before, behind = (float((by_ids - by_embeds)[:, part].abs().max()) for part in (slice(2), slice(2, 5)))
agree = float((explicit - by_embeds).abs().max())
print(f"ids against embeddings: {before:.2g} before the pad token, {behind:.2g} from it on")
print(f"explicit positions against embeddings: {agree:.2g}")
sys.exit(not (before < 1e-5 < 1e-2 < behind and agree < 1e-5))
PYTHON
