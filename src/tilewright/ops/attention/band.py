"""The band of a mask, as kernels compute with it."""


def within(left: int, right: int, s_q: int, s_k: int) -> tuple[int, int]:
    """(left, right) cut to what a distance between s_q queries and s_k keys can be, -1 staying unlimited.

    Then sums of a side and a position stay in int32.
    """
    return min(left, s_q + s_k), min(right, s_q + s_k)
