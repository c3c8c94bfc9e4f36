"""Exception → status: the only table, and the only edge where a call ends badly.

Each class of `service.errors` has one row. Whatever has none is our bug: INTERNAL with an incident id, logged here,
once. No text of an exception and no text of a user reaches a client.

`safe_handlers` is how the servicers are registered:

    server.add_generic_rpc_handlers((
        safe_handlers(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], servicer, report_bug),
    ))

The rpc bodies then simply raise errors of `service.errors`; bytes that are no valid message (bad UTF-8 too) are
answered INVALID_ARGUMENT before a body is called, without the traceback that grpc would log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.rpc import status_pb2

ReportBug = Callable[[str, Exception], None]
"""Called with (incident_id, the exception) once per unknown exception; logs it."""


def to_status(error: Exception) -> tuple[status_pb2.Status, tuple[tuple[str, str], ...]]:
    """The status and the trailing metadata beside it. Total: never raises."""
    raise NotImplementedError


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the error's status."""
    raise NotImplementedError


def safe_handlers(service: ServiceDescriptor, servicer: object, report_bug: ReportBug) -> grpc.GenericRpcHandler:
    """Method handlers for an asyncio servicer, with deserializers that never raise and a catch-all around each body."""
    raise NotImplementedError
