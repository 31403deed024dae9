"""Links that are cut, slowed, delayed and lossy between the network namespaces of peers (Linux,
root)."""
