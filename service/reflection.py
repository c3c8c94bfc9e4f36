"""gRPC reflection under both of its names, so that grpcurl and `buf curl` need no files.

What lives here: the package's servicer, registered as v1alpha and as v1. The package brings v1alpha; v1 has the same
messages, byte for byte, under another package, so the same servicer answers for it, and a renamed descriptor lets it
describe itself. Both go through `status.py`, like every other rpc: what a caller sends is read safely.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import _async as reflection
from grpc_reflection.v1alpha import reflection_pb2

from service.status import ReportBug, safe_dialogue

V1 = "grpc.reflection.v1"
V1ALPHA = "grpc.reflection.v1alpha"


def reflection_handlers(service_names: Sequence[str], report_bug: ReportBug) -> tuple[grpc.GenericRpcHandler, ...]:
    """Handlers that describe these services, and themselves."""
    own_names = [f"{package}.ServerReflection" for package in (V1, V1ALPHA)]
    _register_v1()
    servicer = reflection.ReflectionServicer([*service_names, *own_names])
    method = safe_dialogue(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest,
        reflection_pb2.ServerReflectionResponse,
        report_bug,
    )
    return tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in own_names)


def _register_v1() -> None:
    pool = descriptor_pool.Default()
    with contextlib.suppress(KeyError):
        pool.FindServiceByName(f"{V1}.ServerReflection")
        return
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = V1
    file.ClearField("options")
    alpha, new = f".{V1ALPHA}.", f".{V1}."
    for message in file.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(alpha, new)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(alpha, new)
            method.output_type = method.output_type.replace(alpha, new)
    pool.AddSerializedFile(file.SerializeToString())
