"""What a process can learn from a swarm, or tell it, without joining."""
