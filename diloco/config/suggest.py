"""Which setting was probably meant by a key that is none: typing mistakes, and the words of other trainers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

__all__ = ["ELSEWHERE", "nearest", "suggestions"]

# What other programs call our settings.
ELSEWHERE = {
    "outer.sync_every": "h local_steps inner_steps sync_steps",
    "budget.outer_steps": "steps max_steps num_steps total_steps train_steps rounds num_rounds versions",
    "budget.tokens": "epochs num_epochs num_train_epochs max_epochs",
    "local.peers": "num_peers workers num_workers nproc clients num_clients nodes",
    "inner.batch_size": "batch per_device_train_batch_size global_batch_size",
    "train.micro_batch": "micro_batch_size gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "inner.clip": "max_grad_norm grad_clip clip_grad gradient_clipping gradient_clip_val",
    "inner.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "data.sequence_length": "seq_len seqlen max_length max_seq_len max_seq_length block_size context context_length",
    "data.name": "dataset dataset_name",
    "model.path": "name_or_path model_name_or_path pretrained checkpoint_path",
    "train.precision": "dtype torch_dtype bf16 fp16 mixed_precision",
    "train.log_every": "logging_steps log_interval log_steps",
    "eval.every": "eval_steps eval_interval",
    "checkpoint.every": "save_steps save_every save_interval ckpt_every",
    "run.dir": "output_dir out_dir out save_dir resume resume_from_checkpoint",
    "outer.codec_up": "compression codec quantization bits",
    "swarm.initial_peers": "address bootstrap",
    "swarm.listen": "port host bind",
    "model.config.hidden_size": "dim width d_model n_embd hidden_dim",
    "model.config.intermediate_size": "ffn_dim mlp_dim d_ff",
    "model.config.num_hidden_layers": "layers n_layer n_layers num_layers depth",
    "model.config.num_attention_heads": "heads n_head n_heads num_heads",
    "model.config.num_key_value_heads": "kv_heads n_kv_heads num_kv_heads",
    "model.config.vocab_size": "vocab vocabulary vocabulary_size",
    "model.config.max_position_embeddings": "max_positions n_positions",
    "model.config.tie_word_embeddings": "tie_embeddings tied",
}
_MEANT = {word: key for key, words in ELSEWHERE.items() for word in words.split()}


def suggestions(word: str, known: Sequence[str]) -> list[str]:
    """The known keys that were probably meant, of another program's word too; none if nothing is similar.

    `known` may be the keys of one group without its name.
    """
    if "model.config" in known:  # an open mapping, whose keys most models share
        known = [*known, *(key for key in ELSEWHERE if key.startswith("model.config."))]
    leaf = word.rpartition(".")[2]
    if all(one.rpartition(".")[2] != leaf for one in known):
        if (dotted := word.replace("_", ".", 1)) in known:  # run_id, eval_every
            return [dotted]
        meant = _MEANT.get(word.replace(".", "_").lower()) or _MEANT.get(leaf.lower(), "")
        for key in known:
            if meant == key or meant.endswith(f".{key}"):
                return [key]
    return nearest(word, known)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known keys that are written most like `word`; none if nothing is similar.

    Group and last part are compared apart, an abbreviation matches what it stands for (`learning_rate` finds `lr`), and
    the same last part counts in another group (`data.batch_size`).
    """
    group, _, leaf = word.rpartition(".")

    def score(candidate: str) -> float:
        its_group, _, its_leaf = candidate.rpartition(".")
        similarity = SequenceMatcher(None, leaf, its_leaf).ratio()
        if not group and not its_group:  # `modle=tiny` means the group rather than wandb.mode
            similarity += 0.15
        if _abbreviates(its_leaf, leaf) or _abbreviates(leaf, its_leaf):
            similarity = max(similarity, 0.7)
        if leaf in its_leaf.split("_"):  # warmup
            similarity = max(similarity, 0.9)
        of_groups = SequenceMatcher(None, group, its_group).ratio() if group else 0.0
        return max(similarity + of_groups, 1.75 if group and leaf == its_leaf else 0.0)

    scores = {candidate: score(candidate) for candidate in known}
    best = max(scores.values(), default=0.0)
    return [key for key, value in scores.items() if value == best] if best >= (1.2 if group else 0.6) else []


def _abbreviates(short: str, word: str) -> bool:
    """Whether `short` is the initial and some later letters of `word`, in order."""
    letters = iter(word)
    return len(short) >= 2 and short[:1] == word[:1] and all(letter in letters for letter in short)
