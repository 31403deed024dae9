"""What the benchmarks share: the machine, and the tables of scripts/README.md."""
