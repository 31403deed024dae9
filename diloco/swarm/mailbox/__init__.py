"""A carrier over an object store: peers exchange signed objects, and open no connection."""
