"""The band of a mask in the form that kernels take."""


def clamped_band(left: int, right: int, s_q: int, s_k: int) -> tuple[int, int]:
    """(left, right) clamped to the largest distance between s_q queries and s_k keys; -1 stays unlimited.

    A bound plus a position then stays in int32.
    """
    return min(left, s_q + s_k), min(right, s_q + s_k)
