"""A volunteer's machine: what its peers keep between runs, and the worker that runs one."""
