"""A third implementation of every op of engines: plain Python loops, slow and easy to read."""
