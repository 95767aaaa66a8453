"""`set_num_sms` and `get_num_sms`: how many multiprocessors the products may fill."""

from tilewright.dispatch.registry import GENERATION
from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.hardware.sm_budget import set_sm_budget, usable_sms

_GPU = "cuda"  # the current GPU; without a GPU, the planned one


def set_num_sms(num_sms: int) -> None:
    """Let persistent kernels of this process fill at most `num_sms` multiprocessors; 0 means all.

    It holds from the next call on, for our kernels on every device; where torch is chosen, cuBLAS fills the GPU. CUDA
    graphs captured before keep their grids. Kernels that run in clusters of two leave the last of an odd number idle,
    and fill two for a budget of one. Raises InputError for a negative number, or more than the current GPU has.
    """
    available = device_info(_GPU).sm_count
    if not isinstance(num_sms, int) or not 0 <= num_sms <= available:
        raise InputError(f"set_num_sms({num_sms!r}): needs a number up to {available}, all of this GPU, or 0 for all.")
    set_sm_budget(num_sms or None)
    GENERATION[0] += 1  # tapes hold launches with the former grid


def get_num_sms() -> int:
    """Multiprocessors that persistent kernels fill on the current GPU."""
    return usable_sms(_GPU)
