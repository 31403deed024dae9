"""The `diloco` command: `commands/` knows every command's arguments, one module per command does
the work."""
