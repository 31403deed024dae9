"""How bytes get to a peer, and which peer sent them: libp2p, streams, admission, DHT records."""
