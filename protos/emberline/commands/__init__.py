"""The commands of `emberline`: what the script runs, and those that callers have.

The script belongs to the distribution `emberline`, so that it is there with either of the two. It knows its commands by
the entry-point group `emberline.commands`: this distribution declares `generate` and `health`, `emberline-server` adds
its own. Nothing here imports them by name.
"""
