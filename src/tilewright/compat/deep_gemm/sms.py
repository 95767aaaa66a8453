"""`set_num_sms` and `get_num_sms`: how many multiprocessors the products may fill."""

from tilewright.dispatch.registry import GENERATION
from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.hardware.sm_budget import set_sm_budget, usable_sms

_GPU = "cuda"  # the current one; without a GPU, the one that is planned for


def set_num_sms(num_sms: int) -> None:
    """Let persistent kernels of this process fill at most `num_sms` multiprocessors; 0 gives back all.

    It holds from the next call on, for our kernels on every device; where torch was chosen, cuBLAS fills the machine.
    CUDA graphs that were captured before keep what they had. Kernels that run in clusters of two leave the last of an
    odd number idle, and fill two of one. Raises InputError for a negative number, or more than the current GPU has.
    """
    available = device_info(_GPU).sm_count
    if not isinstance(num_sms, int) or not 0 <= num_sms <= available:
        raise InputError(f"set_num_sms({num_sms!r}): needs a number up to {available}, all of this GPU, or 0 for all.")
    set_sm_budget(num_sms or None)
    GENERATION[0] += 1  # tapes hold launches with the former grid


def get_num_sms() -> int:
    """Multiprocessors that persistent kernels fill on the current GPU."""
    return usable_sms(_GPU)
