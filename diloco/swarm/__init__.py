"""The swarm, over hivemind or a mailbox. The training loop uses `node.Node`."""
