"""A caller's program, run with `-W error` in an environment that has `emberline` alone: see test_client_versions.py.

Usage: client_smoke.py ADDRESS
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys

from emberline.client import AsyncClient, Client, errors

GREEDY = {"temperature": 0, "max_tokens": 8}
PARIS = "The capital of France is"


def main(address: str) -> None:
    for module in ("google.rpc", "grpc_health", "grpc_status", "grpc_reflection", "service", "scheduler", "torch"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        assert not found, f"{module} is here: this environment proves nothing"
    with Client(address) as client:
        text = "".join(delta.text for delta in client.generate(PARIS, **GREEDY))
        assert " Paris" in text, text
        assert client.complete(PARIS, **GREEDY).text == text
        assert client.generate(PARIS, **GREEDY, resume=True).answer().text == text
        ids = client.tokenize(PARIS).ids
        assert client.detokenize(ids) == PARIS
        assert client.complete(ids, **GREEDY).text == text
        assert client.model_info().limits.max_output_tokens
        assert client.server_info().engines
        assert client.load().kv_blocks_total
        assert client.health() == "SERVING"
        assert fields_at_fault(client) == ["sampling.top_p", "stopping.max_tokens"]
        for _ in client.generate(PARIS, max_tokens=500, ignore_eos=True):
            break
    asyncio.run(under_asyncio(address, text))
    print("smoke: fine")


def fields_at_fault(client: Client) -> list[str]:
    try:
        client.complete(PARIS, top_p=7, max_tokens=-1)
    except errors.InvalidRequestError as error:
        return [one.field for one in error.field_violations]
    return []


async def under_asyncio(address: str, text: str) -> None:
    # Twice the same address: a list, so that the channel balances and watches health.
    async with AsyncClient([address, address]) as client:
        streams = [client.generate(PARIS, **GREEDY, resume=True).answer() for _ in range(4)]
        assert {answer.text for answer in await asyncio.gather(*streams)} == {text}
        assert (await client.complete(chat=[("user", "Hi")], max_tokens=4)).usage.completion <= 4
        async for state in client.watch_health():
            assert state == "SERVING"
            break


if __name__ == "__main__":
    main(sys.argv[1])
