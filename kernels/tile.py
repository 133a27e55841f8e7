"""The token tile that plans and programs share; importing it needs no compiler."""

TM = 16  # tokens of a block: one m16 row tile of the tensor cores


def each(count: int) -> tuple[int, ...]:
    """0 to count - 1, for a loop that is unrolled while a program is built; `range` would be a loop of the kernel."""
    return tuple(range(count))
