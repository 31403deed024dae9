REAL = ()


def measure(arguments: object) -> int:
    return 0
