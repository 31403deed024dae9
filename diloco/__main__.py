"""`python -m diloco` is the `diloco` command."""

from __future__ import annotations

from diloco.cli.main import main

if __name__ == "__main__":
    main()
