"""Many peers in one process and in virtual time: the production node, with time and transport
replaced."""
