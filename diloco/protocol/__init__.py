"""Sans-IO core of the swarm: events and a `now` in, actions out; no clock, no socket, no sleep."""
