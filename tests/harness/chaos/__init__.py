"""The parts of `scripts/chaos`: what happens when, peers and figures."""
