"""Powers of two, of which the sizes of blocks are made."""


def next_power(n: int) -> int:
    """Returns the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def refusal_of_size(
    name: str, size: int, *, least: int = 1, most: int | None = None
) -> str | None:
    """Returns why a block size is not a power of two in a range, or None."""
    if size == next_power(size) and least <= size and (most is None or size <= most):
        return None
    beyond = "" if most is None else f" to {most}"
    return f"{name} must be a power of two from {least}{beyond}, got {size}"
