"""The parts of `scripts/fuzz_protocol`: swarms of production peers, what befalls them, and what
must hold."""
