"""Authenticated transport between peers: libp2p, streams, admission, DHT records."""
