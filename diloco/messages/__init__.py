"""Schemas of the messages between peers: `heads` form the history of a fragment, `control` messages
use a stream in each direction between two peers, `bulk` messages a stream per transfer."""
