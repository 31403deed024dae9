"""What outsiders ask a swarm, without being members."""
