"""Low-communication optimizers."""
