"""Powers of two, of which the sizes of blocks are made."""


def next_power(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
