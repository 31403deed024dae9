#!/usr/bin/env bash
# hivemind 1.1.12, torch 2.13.0: the bytes of a multiaddr that ends in /p2p/ID hold the ID as a CIDv1 (01 72 before the multihash).
# The daemon of the same wheel expects the bare multihash, and refuses the address that another peer's get_visible_maddrs()
# returned. The same address works as one of `initial_peers`, which travel as text, and without /p2p/ID. So addresses that need an
# ID inside, those of a relay (/p2p/RELAY/p2p-circuit), cannot be given to a daemon that runs.
#
# Seen: without the ID: connected; with it: "Connect failed. msg=length greater than remaining number of bytes in buffer";
# as text: connected. Exits 0 while this is so.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/env"
"$dir/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 hivemind==1.1.12
cd "$dir" && env/bin/python - <<'PYTHON'
import asyncio
import sys

import hivemind
from hivemind.p2p import P2P
from hivemind.utils.multiaddr import Multiaddr

print("hivemind", hivemind.__version__)


async def outcome(call):
    try:
        await call
    except Exception as error:
        return f"{error}"
    return "connected"


async def main():
    here, there = await P2P.create(), await P2P.create()
    [whole] = await there.get_visible_maddrs()
    bare = Multiaddr(str(whole).partition("/p2p/")[0])
    print("the bytes behind the port:", whole.to_bytes()[len(bare.to_bytes()) :].hex())
    seen = {}
    for name, address in {"bare": bare, "whole": whole}.items():
        seen[name] = await outcome(here._client.connect(there.peer_id, [address]))
    third = await P2P.create(initial_peers=[str(whole)])
    names = [peer.peer_id for peer in await third.list_peers()]
    seen["as text"] = "connected" if there.peer_id in names else f"{names}"
    print(seen)
    for peer in (third, here, there):
        await peer.shutdown()
    refused = "length greater than remaining" in seen.pop("whole")
    return refused and set(seen.values()) == {"connected"}


sys.exit(not asyncio.run(main()))
PYTHON
