"""Work queues: a shared counter that hands out indices.

=============== =================== ==================== ====== ============= ======================
word            writer              reader               scope  order         guards
=============== =================== ==================== ====== ============= ======================
queue head      every workgroup of  the claimer          gpu    relaxed       nothing: a claim only
                this rank, +1                                                 hands out an index
=============== =================== ==================== ====== ============= ======================
"""

import triton
import triton.language as tl


@triton.jit
def queue_claim(head_ptr):
    """The next index of a queue, int32.

    Indices past the end mean that the queue is empty.
    """
    return tl.atomic_add(head_ptr, 1, sem="relaxed", scope="gpu")
