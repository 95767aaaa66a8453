"""Products of many matrices in one launch, their sizes on the device: the experts of a mixture, and what is like them.

Nothing here copies a size to the host or waits for one: which rows belong to which group is read by the kernel that
multiplies them.  The number of groups is a run-time value, groups may be empty, and one may have all rows.
"""
