"""What peers say to each other, as schemas. Other questions have theirs in `swarm/rpc`.

fields, base   what all messages are made of
heads          what is written into the history of a fragment: lines, heads, books
control        members, what they have and do, offers, leases      one stream in each direction
               between two peers
bulk           records, parts of anchors                           one stream per transfer
"""
