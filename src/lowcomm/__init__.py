"""Low-communication optimizers for PyTorch. Import `lowcomm.optim`, `lowcomm.compress` or `lowcomm.sync`."""

__version__ = "0.1.0"
