"""Who may keep threads for parallel loops.

Every thread that runs a parallel loop keeps a team for the next one. While there are more threads in teams
than processors, OpenMP lets them all sleep between loops, and waking them costs more than the short loops of
a decoding step take. So one thread computes, and the others have no team.
"""

import ctypes
import functools

import torch

from megaspan.ops import native

SOFT = 1  # omp_pause_soft: give threads back, keep settings


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """PyTorch's own OpenMP runtime, where that is GNU's."""
    runtime = native.openmp_of_torch()
    try:
        return ctypes.CDLL(str(runtime)) if runtime is not None else None
    except OSError:
        return None


def give_back_team() -> None:
    """End the calling thread's team; it gets a new one if it runs a parallel loop again."""
    openmp = _openmp()
    if openmp is not None and hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(SOFT)


def use_no_team() -> None:
    """From now on the calling thread runs parallel loops by itself."""
    openmp = _openmp()
    if openmp is not None:
        torch.get_num_threads()  # which would set the thread's number at its first loop, and does so now
        openmp.omp_set_num_threads(1)
