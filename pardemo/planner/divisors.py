"""Lists the sizes that a cut may have: divisors of a number, and powers of two."""


def divisors(number: int, most: int) -> list[int]:
    """Returns the divisors of a number up to ``most``."""
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def powers_of_two(most: int) -> list[int]:
    """Returns the powers of two up to ``most``, from 1."""
    return [2**power for power in range(most.bit_length())]
