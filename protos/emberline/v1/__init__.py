"""Generated stubs of the protocol emberline.v1; the .proto files beside them are the source."""
