"""The engine: what forms continuous batches, runs them, and speaks to the front end over a socket."""
