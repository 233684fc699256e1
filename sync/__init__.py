"""Compressed, ordered, agreed reductions on torch.distributed. Knows nothing of optimizers."""
