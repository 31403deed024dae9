"""The README.md beside an exported model: what was trained, from what, and how well it does."""

from __future__ import annotations

import json
from pathlib import Path

from diloco.config import Config
from diloco.rundir.checkpoint import Checkpoint
from diloco.rundir.files import number, read_json_lines
from diloco.text import human_count

__all__ = ["model_card"]


def model_card(config: Config, run_dir: Path, checkpoint: Checkpoint | None) -> str:
    """Markdown with the header that the Hugging Face hub reads, of a checkpoint or of a run's final model."""
    model, data = config.model, config.data
    step, tokens = _progress(run_dir, checkpoint)
    header = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [diloco]"]
    rows = {"run": config.run.id, "manifest": config.manifest().hash(), "outer step": step, "tokens": tokens}
    if model.path is not None and model.revision is not None:
        header.append(f"base_model: {model.path}")
        rows["started from"] = f"{model.path} at {model.revision}"
    rows["text"] = f"{data.name} at {data.revision or 'its newest commit'}" if data.name else data.source
    losses = [
        (int(version), loss)
        for line in read_json_lines(run_dir / "metrics.jsonl")
        if (loss := number(line.get("eval_loss"))) is not None and (version := number(line.get("version"))) is not None
    ]
    known = [one for one in losses if checkpoint is None or one[0] <= checkpoint.step]
    if known:
        version, loss = max(known, key=lambda one: one[0])
        rows["held-out loss"] = f"{loss:.4f} nats per token, at outer step {version}"
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    front = "\n".join(["---", *header, "---"])
    return f"{front}\n\n# {config.run.id}\n\nTrained with diloco.\n\n| | |\n|---|---|\n{table}\n"


def _progress(run_dir: Path, checkpoint: Checkpoint | None) -> tuple[str, str]:
    """Outer step and tokens."""
    if checkpoint is not None:
        return str(checkpoint.step), human_count(float(checkpoint.state["applied_tokens"]))
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return str(int(summary["outer_steps"])), human_count(float(summary["tokens"]["applied"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown", "unknown"
