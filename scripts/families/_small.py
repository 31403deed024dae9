"""Small configs of every causal language model of transformers, by shrinking its default one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCABULARY = 320  # which has the ids of bytes
# Names of settings, and what a larger value becomes.
SIZES = {
    r"(ngram_)?vocab_size(_per_layer_input|_base)?": VOCABULARY,
    r"(max|n)_(position|ctx|seq|target|source).*|seq_length|attention_window|.*window(_size)?": 64,
    r".*(num_hidden_layers|n_layers?|num_layers|num_blocks|coder_layers)": 2,
    r".*(num_key_value_heads|n_kv_heads|num_kv_heads)": 2,
    r".*(_heads|n_heads?)": 4,
    r".*experts": 4,
    r".*(experts_per_tok(en)?|top_k|num_selected_experts|moe_topk|moe_k)": 2,
    r".*(head_dim|d_kv|head_size).*": 8,
    r".*(intermediate_size|ffn_dim|ffn_hidden.*|n_inner|d_ff|d_inner|mlp_dim|ffn_size)": 64,
    r".*hidden_size|(d|hid|emb)_model|n_embd|.*_?dim|embedding_size|width|lru_width": 32,
    r".*_rank": 8,
    r".*(state_size|d_state)": 8,
}
# What does not follow from sizes: divisors, lists of layers, and numbers that default to none.
OTHERS: dict[str, dict[str, Any]] = {
    "axk1": {"q_lora_rank": 8, "kv_lora_rank": 8, "n_group": 1, "topk_group": 1},
    "codegen": {"rotary_dim": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 2}
    | {"activation_sparsity_pattern": [0.0] * 2, "intermediate_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "is_decoder": True},
    "roc_bert": {"shape_vocab_size": 50, "pronunciation_vocab_size": 50}
    | {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
}
# Those that have more to them than sizes, and none here.
NOT_MADE = {
    "blt": "its tables of hashes are tied to sizes of patches",
    "cohere_compass_text": "its default says no rotary embedding of its layers",
    "dots3_note": "its layers are numbered one by one",
    "gemma3n": "its vision tower is of timm",
    "gemma4_assistant": "it reads the states of another model",
    "gemma4_unified": "its vision tower does not become small",
    "gemma4_unified_assistant": "it reads the states of another model",
    "longcat_flash": "its sizes of heads are tied to each other",
    "mimo_v2_flash": "its sizes of heads are tied to each other",
    "musicgen": "a decoder of sound, built from parts",
    "musicgen_melody": "a decoder of sound, built from parts",
    "zamba2": "its shared blocks are tied to numbers of layers",
}


def small_config(model_type: str) -> Any:
    """A config of this type for a model of some ten thousand parameters."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**(_shrunk(kind) | OTHERS.get(model_type, {})))


def _shrunk(kind: Any) -> dict[str, Any]:
    try:
        default = vars(kind())
    except Exception:  # some have no default that is valid
        default = {one.name: getattr(kind, one.name, None) for one in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    parts = getattr(kind, "sub_configs", {})
    for name, value in default.items():
        if name in parts:
            known = value is not None and not isinstance(value, dict)
            given[name] = _shrunk(type(value) if known else parts[name])
        elif type(value) is int and not name.startswith("_"):
            sizes = [size for rule, size in SIZES.items() if re.fullmatch(rule, name)]
            if "value_heads" in name and value == default.get("num_attention_heads"):
                given[name] = 4
            elif sizes and value > sizes[0]:
                given[name] = sizes[0]
            elif not sizes and "token" in name and value >= VOCABULARY:
                given[name] = VOCABULARY - 1
    return given


def trained_like(config: Any) -> nn.Module:
    """A model whose weights are as large as those of trained ones, none of them zero."""
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.1)
    return model.eval()
