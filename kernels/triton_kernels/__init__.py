"""Triton kernels for GPUs. Nothing is imported here: ``triton`` itself comes with the first kernel asked for."""

__all__: tuple[str, ...] = ()
