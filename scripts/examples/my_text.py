"""My text on two machines: two commands, which this file types for two terminals of one machine.

    diloco train data=text data.path=notes/ run.id=my-text swarm=network swarm.min_peers=2
    diloco join ADDRESS data.path=my_notes/

    python scripts/examples/my_text.py              the first, with a small model; it prints what
                                                    the second types
    python scripts/examples/my_text.py ADDRESS      the second, from another terminal

`data.path` is a text file or a folder of them. Each machine reads its own, and no text is sent.
Here the one has half of the sources of torch and the other the rest; the model reads bytes. 10
rounds, in half a minute; both end with the same model, and the first writes it to model/, where
`diloco generate model --prompt 'def '` finds it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SMALL = (
    "experiment=smoke budget.outer_steps=10 inner.batch_size=8 data.sequence_length=64"
    " outer.sync_every=5 data=text run.id=my-text swarm.min_peers=2"
).split()


def diloco(*arguments):
    """Type a command; a failed one ends this program."""
    print("$ diloco", *arguments, flush=True)
    ended = subprocess.run([sys.executable, "-m", "diloco", *arguments])
    if ended.returncode:
        sys.exit(ended.returncode)


joins = sys.argv[1:2]
notes = Path(tempfile.mkdtemp()) / "notes"
notes.mkdir()
for number, file in enumerate(sorted(Path(torch.__file__).parent.glob("*.py"))):
    if number % 2 == len(joins):
        shutil.copy(file, notes / f"{file.stem}.txt")

print(f"first file: {min(notes.iterdir()).name}", flush=True)
if joins:
    diloco("join", *joins, f"data.path={notes}", "train.device=cpu", "--yes")
else:
    diloco("train", *SMALL, f"data.path={notes}")
    diloco("export", "runs/my-text", "model")
