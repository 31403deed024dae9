"""What two peers say to each other: each module is one conversation."""
