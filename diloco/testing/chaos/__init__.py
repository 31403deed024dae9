"""The parts of `scripts/chaos`: what happens when, peers, figures and text."""
