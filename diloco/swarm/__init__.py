"""The swarm over hivemind: the only part that knows it. `node.Node` is what the training loop
holds."""
