"""Every cap that is no caller's business: what the server holds of all its callers together, and for how long.

What lives here: the numbers, each with its reason. What must not: what one request is held to (`request.Limits`, told
by GetModelInfo) and what operators size by flags (`config.py`: --max-queue-requests, --max-queue-tokens,
--reader-timeout, --stream-buffer-tokens). A call passes them in this order:

| where | cap | over it |
|---|---|---|
| its connection | STREAMS_PER_CONNECTION_MAX, METADATA_BYTES_MAX | its own library waits; RESOURCE_EXHAUSTED by gRPC |
| gRPC's inbox | PENDING_CALLS_MAX | RESOURCE_EXHAUSTED by gRPC |
| before its message is read | a full queue; RECEIVING_CALLS_MAX | QUEUE_FULL; the same to the oldest of them |
| its message | `ServerConfig.max_request_bytes` | RESOURCE_EXHAUSTED by gRPC |
| its place, before any work for it | --max-queue-requests, --max-queue-tokens, LIVE_CALLS_PER_SEQ_MAX | QUEUE_FULL |
| threads | the same, and WORKER_BYTES_MAX | QUEUE_FULL |
| its answer | --stream-buffer-tokens, STREAM_BUFFER_BYTES | its steps pause |
| its reader | --reader-timeout | SLOW_READER |
"""

from __future__ import annotations

STREAMS_PER_CONNECTION_MAX = 8192
"""Calls open at once on one connection; told to clients, whose libraries hold back what is more."""
METADATA_BYTES_MAX = 16 * 1024
"""Of one call's headers. A bearer token and a trace context take one or two thousand."""
PENDING_CALLS_MAX = 32_768
"""Calls that have arrived and that the loop has not come to yet."""
RECEIVING_CALLS_MAX = 8192
"""Of one service: calls whose message has not come yet. They hold nothing but some kilobytes of gRPC's own."""
LIVE_CALLS_PER_SEQ_MAX = 4
"""Beside those in the queue, times --max-num-seqs: what runs, and answers that are there and are still being read."""
WORKER_BYTES_MAX = 64 * 1024 * 1024
"""Of messages whose prompts wait for a thread; to encode a text takes many times its size, but one at a time."""
STREAM_BUFFER_BYTES = 256 * 1024
"""Of one answer's tokens that its reader has not taken, with their logprobs, as they lie in memory. Two thousand tokens
without, a hundred with twenty logprobs each."""
WATCHERS_MAX = 8192
"""Open Watch calls of the health service. A stalled one holds an event and its task."""
