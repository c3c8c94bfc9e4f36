"""The client for callers: typed, for threads (`Client`) and for asyncio (`AsyncClient`), on grpcio and protobuf alone.

    from emberline.client import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("The capital of France is", temperature=0, max_tokens=8):
            print(delta.text, end="", flush=True)

| module | what lives there |
|---|---|
| `sync`, `aio` | the two clients and their streams; they wait, and decide nothing |
| `request` | keywords → GenerateRequest |
| `results` | messages → frozen values |
| `errors` | what can come of a call, as exceptions |
| `connection` | addresses, TLS, tokens, balancing, retries |
| `_progress` | one stream over all its attempts |
"""

from emberline.client import errors
from emberline.client._progress import Resume
from emberline.client.aio import AsyncClient, AsyncStream
from emberline.client.connection import Tls
from emberline.client.errors import EmberlineError
from emberline.client.request import ChatMessage, Options
from emberline.client.results import (
    Answer,
    Completion,
    Delta,
    Finish,
    Prompt,
    Token,
    Tokenization,
    TokenLogprob,
    Usage,
)
from emberline.client.sync import Client, Stream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "ChatMessage",
    "Client",
    "Completion",
    "Delta",
    "EmberlineError",
    "Finish",
    "Options",
    "Prompt",
    "Resume",
    "Stream",
    "Tls",
    "Token",
    "TokenLogprob",
    "Tokenization",
    "Usage",
    "errors",
]
