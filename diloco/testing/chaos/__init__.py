"""The parts of `scripts/chaos`: what happens when, peers, figures, text, and the table of scripts/TABLES.md."""
