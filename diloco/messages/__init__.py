"""What peers say to each other, as schemas: `heads` go into the history of a fragment, `control`
over one stream in each direction between two peers, `bulk` over one stream per transfer."""
