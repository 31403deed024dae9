"""One peer in the swarm: the core, its tensors and its streams."""
