"""One peer of the swarm: it drives the protocol core and holds the conversations."""
