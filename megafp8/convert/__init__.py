"""Checkpoints of other programs to ours and back, tensor by tensor."""
