"""The ring that does: torch, transformers and the attention kernels."""
