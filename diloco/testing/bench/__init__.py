"""What the benchmarks share: the machine, and the tables of the pages in scripts/."""
