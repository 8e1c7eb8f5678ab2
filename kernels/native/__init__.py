"""CPU kernels in C++, built on first use with the compiler that the machine has.

Nothing is built or loaded by importing this package; see ``kernels.native.library``.
"""

__all__: tuple[str, ...] = ()
