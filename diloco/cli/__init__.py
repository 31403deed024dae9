"""The `diloco` command: `main.py` knows every command's arguments, one module per command does the work."""
