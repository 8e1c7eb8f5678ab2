"""Prefill and decode in two engines: the one offers the KV blocks of a prompt, the other fetches them and goes on.

::

    router              prefill engine                     decode engine
      prompt, 1 token ---->  computes it
      <-- offer -----------  keeps its blocks (a lease)
      prompt, offer ------------------------------------->  admits it, holds no slot and no block for it
                             <------------ which blocks --  a few MiB at a time, in its own thread
                             -- blocks and digests ------>
                             <------------------ release -  schedules it: the blocks are its prefix
      <----------------------------------- output --------

``connector`` is what the engine sees of it, ``producer`` and ``consumer`` are its two sides; ``sender`` and
``receiver`` are their threads, which alone touch the network; ``leases`` says which blocks a sender may read.
"""
