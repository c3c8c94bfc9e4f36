"""Engine states → grpc.health.v1, answered from memory.

The law: the latest value per watcher and nothing else; no lock is held across a write, so one stalled watcher harms
nobody; Watch sends every change it can still send, and ends only when the caller or `close()` ends it.
"""

from __future__ import annotations

from grpc_health.v1 import health_pb2_grpc

READINESS_NAMES = ("", "readiness", "emberline.v1.InferenceService")
LIVENESS_NAME = "liveness"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the stub is not annotated
    """Readiness names begin NOT_SERVING, liveness SERVING."""

    def __init__(self, *, max_watchers: int = 1024) -> None:
        raise NotImplementedError

    def set_serving(self, serving: bool) -> None:
        """Whether a request sent now would be served. On the loop's thread; never blocks."""
        raise NotImplementedError

    def set_alive(self, alive: bool) -> None:
        """Whether the process can still recover by itself."""
        raise NotImplementedError

    def close(self) -> None:
        """End every Watch (after it has been sent the last value if its reader takes it) and refuse new ones. Call it
        before server.stop(): one open Watch would use up its whole grace.
        """
        raise NotImplementedError
