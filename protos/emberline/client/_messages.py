"""Messages of other packages that a caller meets: google.rpc's error details and grpc.health.v1.

What must live here: the few fields of them that this client reads, described by hand in a descriptor pool of its own.
What must not: meaning (`errors.py`, `_core.py`). The packages that ship them (googleapis-common-protos,
grpcio-health-checking) are not needed, and where a program has them as well nothing collides, since theirs are in the
default pool.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

_Field = tuple[int, str, "str | int"]
_STRING, _BYTES, _INT32, _INT64 = (
    FieldDescriptorProto.TYPE_STRING,
    FieldDescriptorProto.TYPE_BYTES,
    FieldDescriptorProto.TYPE_INT32,
    FieldDescriptorProto.TYPE_INT64,
)

# A type that ends with * is repeated. A map is, on the wire, a list of entries; an enum is a number.
_SHAPES: dict[str, dict[str, tuple[int, int | str]]] = {
    "Any": {"type_url": (1, _STRING), "value": (2, _BYTES)},
    "Duration": {"seconds": (1, _INT64), "nanos": (2, _INT32)},
    "Entry": {"key": (1, _STRING), "value": (2, _STRING)},
    "Status": {"code": (1, _INT32), "message": (2, _STRING), "details": (3, "Any*")},
    "ErrorInfo": {"reason": (1, _STRING), "domain": (2, _STRING), "metadata": (3, "Entry*")},
    "RetryInfo": {"retry_delay": (1, "Duration")},
    "FieldViolation": {"field": (1, _STRING), "description": (2, _STRING)},
    "BadRequest": {"field_violations": (1, "FieldViolation*")},
    "HealthCheckRequest": {"service": (1, _STRING)},
    "HealthCheckResponse": {"status": (1, _INT32)},
}
_PACKAGE = "emberline.client.foreign"


def _describe() -> DescriptorPool:
    file = FileDescriptorProto(name="emberline/client/foreign.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SHAPES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if isinstance(kind, str):
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind.removesuffix('*')}"
                if kind.endswith("*"):
                    field.label = FieldDescriptorProto.LABEL_REPEATED
            else:
                field.type = kind  # type: ignore[assignment] # one of its own values
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call,unused-ignore]
    return pool


_POOL = _describe()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


Status = _message("Status")
"""google.rpc.Status."""
DETAILS: dict[str, Any] = {f"google.rpc.{name}": _message(name) for name in ("ErrorInfo", "RetryInfo", "BadRequest")}
"""The details that are read, by the full name that an Any gives."""
HealthCheckRequest = _message("HealthCheckRequest")
HealthCheckResponse = _message("HealthCheckResponse")
HEALTH_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
"""grpc.health.v1.HealthCheckResponse.ServingStatus, by number."""
