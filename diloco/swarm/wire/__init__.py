"""How bytes get to a peer, and from whom they came: libp2p, streams, admission, DHT records."""
