"""The front end: gRPC in, one socket per engine out. No torch, no model weights."""
