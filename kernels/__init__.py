"""Attention and fused ops: a plain-torch oracle for each, and the fastest path that the machine has.

Nothing heavy is imported here, torch included; import the op you need, e.g. ``from kernels.rms_norm import rms_norm``.
The name is also that of a Hugging Face distribution, which transformers looks for by its metadata; ours has none under
that name, so transformers goes on without it.
"""

__all__: tuple[str, ...] = ()
