"""Arguments of every command, one module per audience."""
