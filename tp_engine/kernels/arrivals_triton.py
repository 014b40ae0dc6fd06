"""The last program of a group to arrive goes on with what all of them have stored, without another launch.

::

    every program     store its part | all threads meet | one arrives: counter + 1, acquire and release
    the last of them                                    | all threads meet | counter = 0 | read all parts

The counters are zeros before and after a launch, so the same launch can be replayed.
"""

import triton.language as tl

from tp_engine.kernels.jit import jit


@jit
def arrives_last(arrived, num_programs):
    """Whether this program is the last of ``num_programs`` to arrive; it may then read what the others have stored,
    past the first-level cache (``.cg``), which does not see what other multiprocessors have written.

    The counter is at ``arrived``.
    """
    tl.debug_barrier()  # all threads' stores come before the one thread's arrival
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last
