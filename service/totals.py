"""Running totals of one server: the numbers that outlive engines and calls.

What lives here: plain counts, each written by the one part that knows of the event, in the loop's thread, and read by
whoever tells them (InfoService, metrics, load reports), from any thread: each is one number. What must not: anything by
engine or by request (replicas and the journal have those), decisions, I/O.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """All begin at zero with the server. Names that begin with `num_live` go down, too; the others never do."""

    num_live_calls: int = 0
    """Calls of Generate and Complete that have not ended, those on their way to a refusal included."""
    num_finished_calls: int = 0
    """Such calls that have ended, however they did."""
    num_failed_calls: int = 0
    """Of these, those that ended with a status that is the server's fault, or its lack of room."""
    num_generated_tokens: int = 0
    """Output tokens that engines have brought, over all engines, dead ones included."""
    num_deaths: int = 0
    """Deaths of engines that filled a replica's place."""
    num_restarts: int = 0
    """Engines started in the place of one that died."""
    num_replays: int = 0
    """Times a stream was sent to another engine after a death."""
    num_poison_refused: int = 0
    """Calls refused because the same request has killed an engine."""
    num_poison_found: int = 0
    """Requests found to have killed an engine."""
